"""scripts/evidence.py and its report: which runs are left to do, and what is made of results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import evidence
import evidence_report

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def result(variant: str, seed: int, accuracies: list[float]) -> Any:
    points = [{"generations": 64 * i, "accuracy": a, "standard_error": 0.07} for i, a in enumerate(accuracies)]
    return {"task": "code", "variant": variant, "seed": seed, "points": points}


def comparison(**teachers: float | None) -> Any:
    """A comparison of a student with accuracy 0.25 and of teachers by what they are shown."""
    found = {
        shown: None if mean is None else {"student": {"mean": 0.25}, "teacher": {"mean": mean}}
        for shown, mean in teachers.items()
    }
    return {"teacher": {"run": found["both"], "by_context": found}}


def test_every_setting_of_every_run_is_one_that_the_library_takes(tmp_path: Path) -> None:
    from sdpo import SDPOConfig

    for task in evidence.TASKS.values():
        for variant in evidence.VARIANTS.values():
            config = SDPOConfig(output_dir=str(tmp_path), **{**evidence.SHARED, **task.settings, **variant})
            assert config.generation_batch_size % config.num_generations == 0
    assert set(evidence.VARIANTS) == set(evidence_report.NAMES)
    assert {name for names in evidence_report.PANELS.values() for name in names} == set(evidence.VARIANTS)


def test_held_out_questions_are_not_trained_on() -> None:
    for task in evidence.TASKS.values():
        train, held_out, _ = task.build()
        asked = {json.dumps(row["prompt"]) for row in train}
        assert len(held_out) >= 20 and not asked & {json.dumps(row["prompt"]) for row in held_out}


def test_a_curve_is_the_mean_over_seeds_with_its_standard_error() -> None:
    runs = [result("grpo", 1, [0.1, 0.4, 0.9]), result("grpo", 2, [0.3, 0.8])]
    # (0.1 + 0.3) / 2; |0.3 - 0.1| / 2; and the third point is there in one run only
    assert evidence_report.curve(runs) == [(0, 0.2, pytest.approx(0.1)), (64, pytest.approx(0.6), pytest.approx(0.2))]
    assert evidence_report.curve(runs[:1])[0] == (0, 0.1, 0.07)


def test_the_table_says_when_the_baselines_accuracy_was_reached() -> None:
    by_variant = {
        "both": [result("both", 1, [0.2, 0.55, 0.7])],
        "siblings": [result("siblings", 1, [0.2, 0.3, 0.4])],
        "feedback": [result("feedback", 1, [0.2, 0.3, 0.4])],
        "grpo": [result("grpo", 1, [0.2, 0.3, 0.5])],
        "teacher": [comparison(both=b, demonstration=0.4, feedback=None) for b in (0.45, 0.55)],
    }
    lines = {line.split(" | ")[0]: line for line in evidence_report.table(by_variant).splitlines()}
    both = lines[f"| {evidence_report.NAMES['both']}"]
    assert "| 0.25 to 0.50 | 0.200 | 0.700 (0.070) | 64 of 128 | 1 |" in both
    assert "| 0.25 to 0.40 | 0.200 | 0.400 (0.070) | not reached" in lines[f"| {evidence_report.NAMES['siblings']}"]
    assert lines[f"| {evidence_report.NAMES['feedback']}"].split(" | ")[1] == ""
    assert "128 of 128" in lines[f"| {evidence_report.NAMES['grpo']}"]


def test_runs_with_a_result_are_left_out_and_a_failed_one_is_told(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "WORK", tmp_path)
    evidence.write(tmp_path / "code-grpo-1.json", "{}")
    assert evidence.run_all([("code", "grpo", 1)], tmp_path, jobs=1, max_steps=None) == 0
    assert "1 of 1 runs have a result" in capsys.readouterr().out
    assert evidence.run_all([("no_such_task", "grpo", 1)], tmp_path, jobs=1, max_steps=None) == 1
    assert "no_such_task-grpo-1 FAILED" in capsys.readouterr().out
    assert "KeyError: 'no_such_task'" in (tmp_path / "logs" / "no_such_task-grpo-1.txt").read_text()


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="curves need matplotlib")
def test_the_report_puts_curves_and_tables_between_the_marks(tmp_path: Path) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    docs.mkdir()
    for variant in ("both", "grpo"):
        evidence.write(results / f"code-{variant}-1.json", json.dumps(result(variant, 1, [0.2, 0.5])))
    page = docs / "evidence.md"
    page.write_text(f"# Evidence\n\n{evidence_report.BEGIN}\nold\n{evidence_report.END}\n\nafter\n")
    evidence_report.report(results, docs)
    text = page.read_text()
    assert "old" not in text and "## code" in text and text.startswith("# Evidence") and text.endswith("after\n")
    assert (docs / "images" / "evidence_code.png").stat().st_size > 1000
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has to hold the lines"):
        evidence_report.report(results, docs)


def test_without_results_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There are no results"):
        evidence_report.report(tmp_path, tmp_path)
