"""Several processes with one server, and with an engine each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Server, free_port

pytestmark = pytest.mark.vllm


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_two_ranks_sample_with_the_weights_of_the_policy(
    policy_folders: dict[bool, Path], tmp_path: Path, server: Server, mode: str
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port()), str(Path(__file__).parent / "ranks.py")]
    command += [str(tmp_path), str(policy_folders[True])]
    command += [server.url, str(free_port())] if mode == "server" else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(next(line for line in run.stdout.splitlines() if line.startswith('{"steps"')))
    assert found["steps"] == 3 and len(found["losses"]) == 3
    assert any(loss != 0 for loss in found["losses"])
    assert all(weight is None or abs(weight - 1) < 1e-4 for weight in found["weights"])
