"""A run as one HTML page that needs nothing else: its curves, and its attempts with the credit of every token.

python -m sdpo.report RUN_DIR [-o report.html]
"""

from __future__ import annotations

from pathlib import Path

from sdpo.report.page import render
from sdpo.report.run import Selection, read_run

__all__ = ["Selection", "write_report"]


def write_report(run_dir: Path, output: Path, *, selection: Selection | None = None) -> dict[str, int]:
    """Writes the page of a run; returns how many steps, attempts and bytes it holds.

    Raises:
        ValueError: the folder holds no log of a run, or the selection leaves no step of it.
    """
    run = read_run(run_dir, selection or Selection())
    page = render(run)
    output.write_text(page, encoding="utf-8")
    return {"steps": len(run.steps), "attempts": run.num_attempts, "bytes": output.stat().st_size}
