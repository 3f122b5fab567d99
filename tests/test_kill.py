"""A real process, killed for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_bitwise_as_if_it_had_not_been(tmp_path: Path) -> None:
    here = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, str(here / "kill_and_resume.py"), str(tmp_path), "20"],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}", "OMP_NUM_THREADS": "1"},
    )
    kills = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(kills) == 20, result.stderr[-3000:]
    assert [kill for kill in kills if not kill["equal"]] == [], result.stderr[-3000:]
    assert sum("inside a save" in kill["where"] for kill in kills) >= 5
