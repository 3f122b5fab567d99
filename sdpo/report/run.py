"""What a run left behind, as the page takes it: log entries, and its attempts in columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sdpo import completion_log


@dataclass(frozen=True, slots=True)
class Selection:
    """Which attempts are shown: those of the steps from `first_step` to `last_step` (None: to the end).

    Where these are more than `max_attempts`, whole steps evenly spread, so that groups stay whole.
    """

    first_step: int = 0
    last_step: int | None = None
    max_attempts: int = 20_000


@dataclass(frozen=True, slots=True)
class Run:
    """name: of its folder. history: entries of the log. files: of the attempts shown, by step. num_left_out: steps not
    shown because of `max_attempts`.
    """

    name: str
    history: list[dict[str, Any]]
    files: dict[int, Path]
    num_attempts: int
    num_left_out: int = 0
    steps: list[int] = field(default_factory=list)

    def tables(self) -> Iterator[tuple[int, pa.Table]]:
        """The attempts of each step."""
        for step, path in self.files.items():
            yield step, pq.read_table(path)


def read_run(run_dir: Path, selection: Selection) -> Run:
    """The run of this output folder.

    Raises:
        ValueError: there is no such folder, no log in it, or no step left by the selection.
    """
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is no folder. Give the output_dir of a run.")
    folder = run_dir / completion_log.FOLDER
    history, files = log_history(run_dir), completion_log.files_in(folder)
    if not files and not history:
        raise ValueError(
            f"{run_dir} holds no log: neither {completion_log.FOLDER}/ nor trainer_state.json. Set "
            "log_completions=True, and give the output_dir of that run."
        )
    last = math.inf if selection.last_step is None else selection.last_step
    chosen = {step: path for step, path in files.items() if selection.first_step <= step <= last}
    if files and not chosen:
        raise ValueError(
            f"There are attempts of the steps {min(files)} to {max(files)}, and none from {selection.first_step} to "
            f"{last}."
        )
    sizes = {step: pq.read_metadata(path).num_rows for step, path in chosen.items()}
    kept = _spread(sizes, selection.max_attempts)
    return Run(
        name=run_dir.resolve().name,
        history=history,
        files={step: chosen[step] for step in kept},
        num_attempts=sum(sizes[step] for step in kept),
        num_left_out=len(sizes) - len(kept),
        steps=kept,
    )


def _spread(sizes: dict[int, int], limit: int) -> list[int]:
    """Steps evenly spread whose attempts are `limit` at most; one step at least."""
    steps = list(sizes)
    number = len(steps)
    while number > 1:
        kept = [steps[i * len(steps) // number] for i in range(number)]
        total = sum(sizes[step] for step in kept)
        if total <= limit:
            return kept
        number = min(number - 1, max(1, number * limit // total))
    return steps[:1]


def log_history(run_dir: Path) -> list[dict[str, Any]]:
    """Entries of the log, from where they reach furthest.

    `Trainer` leaves them in the `trainer_state.json` of each checkpoint, and of the folder after `save_state()`;
    with `log_completions` they are also written as they come.
    """
    found = [completion_log.read_metrics(run_dir / completion_log.FOLDER)]
    for path in [run_dir / "trainer_state.json", *sorted(run_dir.glob("checkpoint-*/trainer_state.json"))]:
        if path.exists():
            found.append(json.loads(path.read_text(encoding="utf-8")).get("log_history", []))
    return max(found, key=lambda entries: max((entry.get("step", 0) for entry in entries), default=-1))


def curves(history: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every logged number that is finite, by name; the last one where a step has several."""
    found: dict[str, dict[int, float]] = {}
    for entry in history:
        for name, value in entry.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and math.isfinite(value) and name != "step":
                found.setdefault(name, {})[entry.get("step", 0)] = value
    return {name: sorted(by_step.items()) for name, by_step in found.items()}
