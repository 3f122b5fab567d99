"""Curves and tables of the results that `scripts/evidence.py` left."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
Point = tuple[int, float, float]  # generations, mean accuracy over seeds, its standard error

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
PANELS = {
    "what the teacher is shown": ("both", "feedback", "siblings", "blend", "grpo"),
    "which weights it has": ("both", "teacher_base", "teacher_live", "teacher_trust_region", "grpo"),
    "on which tokens": ("both", "reverse_kl", "sampled_token", "grpo"),
}
NAMES = {
    "both": "both: siblings and feedback, EMA, top 20, JSD",
    "feedback": "feedback alone",
    "siblings": "siblings alone",
    "grpo": "policy gradient alone (weight 0)",
    "blend": "both, blended with the policy gradient (weight 0.5)",
    "teacher_base": "both, teacher frozen",
    "teacher_live": "both, teacher is the student",
    "teacher_trust_region": "both, trust region",
    "reverse_kl": "both, reverse KL",
    "sampled_token": "both, reverse KL on the sampled token",
}


SHOWN = {"feedback": "feedback", "siblings": "demonstration"}  # what a teacher is shown who is shown less than both


def read(results: Path) -> dict[str, dict[str, list[Result]]]:
    """Results by task and variant."""
    found: dict[str, dict[str, list[Result]]] = {}
    for path in sorted(results.glob("*.json")):
        result = json.loads(path.read_text())
        found.setdefault(result["task"], {}).setdefault(result["variant"], []).append(result)
    return found


def curve(runs: Sequence[Result]) -> list[Point]:
    """Mean over seeds at each point that all of them have, and the standard error of that mean.

    With one seed the error is that over questions; seeds share the questions, so theirs does not hold it.
    """
    by_run = [{point["generations"]: point for point in run["points"]} for run in runs]
    points = []
    for generations in sorted(set.intersection(*(set(points) for points in by_run))):
        values = [points[generations]["accuracy"] for points in by_run]
        mean = sum(values) / len(values)
        if len(values) > 1:
            error = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
        else:
            error = by_run[0][generations]["standard_error"]
        points.append((generations, mean, error))
    return points


def reaches(points: Sequence[Point], accuracy: float) -> int | None:
    """The first point, in generations, from which the mean accuracy is at least this one; None where there is none."""
    return next((generations for generations, mean, _ in points if mean >= accuracy), None)


def table(by_variant: Mapping[str, Sequence[Result]]) -> str:
    """A line a variant: the teacher before training, accuracy before and after, generations to the baseline's."""
    curves = {name: curve(by_variant[name]) for name in NAMES if name in by_variant}
    target = curves["grpo"][-1][1] if "grpo" in curves else math.inf
    lines = [
        "| variant | student and teacher before training | accuracy before | after | "
        "generations to the policy gradient's last accuracy | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, points in curves.items():
        first, last = points[0], points[-1]
        reached, compared = reaches(points, target), teacher_gain(by_variant.get("teacher", []), name)
        lines.append(
            f"| {NAMES[name]} | {compared} | {first[1]:.3f} | {last[1]:.3f} ({last[2]:.3f}) | "
            f"{'not reached' if reached is None else reached} of {last[0]} | {len(by_variant[name])} |"
        )
    return "\n".join(lines)


def teacher_gain(comparisons: Sequence[Result], variant: str) -> str:
    """Accuracy of student and teacher on the same questions before training, means over seeds; empty where unknown."""
    if variant == "grpo":
        return ""
    found = []
    for comparison in (run["teacher"] for run in comparisons):
        shown = comparison["by_context"][SHOWN[variant]] if variant in SHOWN else comparison["run"]
        found += [] if shown is None else [shown]
    if not found:
        return ""
    student, teacher = (sum(f[who]["mean"] for f in found) / len(found) for who in ("student", "teacher"))
    return f"{student:.2f} to {teacher:.2f}"


def plot(task: str, by_variant: Mapping[str, Sequence[Result]], path: Path) -> None:
    """Accuracy against generations, a panel for each question; bands are one standard error."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(5 * len(PANELS), 4), sharey=True)
    colors = {name: f"C{i}" for i, name in enumerate(NAMES)}
    for axes, (title, variants) in zip(panels, PANELS.items(), strict=True):
        for name in variants:
            if name not in by_variant:
                continue
            generations, means, errors = zip(*curve(by_variant[name]), strict=True)
            axes.plot(generations, means, label=name, color=colors[name], marker=".")
            low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
            axes.fill_between(generations, low, high, color=colors[name], alpha=0.15)
        axes.set(title=title, xlabel="generations")
        axes.legend(fontsize="small")
    panels[0].set_ylabel(f"held-out accuracy, {task}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(results: Path, docs: Path) -> None:
    """Draws the curves into `docs/images` and writes the tables into `docs/evidence.md`, between its two marks.

    Raises:
        ValueError: there are no results, or the page lacks the marks.
    """
    found = read(results)
    if not found:
        raise ValueError(f"There are no results in {results}; run scripts/evidence.py without --plot first.")
    parts = []
    for task, by_variant in found.items():
        plot(task, by_variant, docs / "images" / f"evidence_{task}.png")
        parts.append(
            f"### {task}\n\n![accuracy against generations](images/evidence_{task}.png)\n\n{table(by_variant)}"
        )
    page = docs / "evidence.md"
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} has to hold the lines {BEGIN} and {END}, once each.")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}")
    print(f"{page} has {sum(len(runs) for v in found.values() for runs in v.values())} runs")
