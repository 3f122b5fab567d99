"""Several processes by torchrun, under a hard limit of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
CONFIGS = HERE.parent.parent / "examples" / "accelerate_configs"


def environment(**more: str) -> dict[str, str]:
    """Without GPUs and without the network, with the modules of the tests."""
    paths = [str(HERE), str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }


def torchrun(
    script: Path, *arguments: object, num_ranks: int = 2, limit_s: float, **env: str
) -> subprocess.CompletedProcess[str]:
    """The processes' output; a launch that outlasts the limit is killed with all its ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    process = subprocess.Popen(
        [*command, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**env),
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks, which are in sessions of their own
        try:
            output, _ = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        raise AssertionError(f"not finished after {limit_s} s:\n{output[-6000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def launched_with(name: str, folder: Path, **env: str) -> dict[str, Any]:
    """What two processes on CPUs say, started by `accelerate launch` with a configuration that is shipped."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{name}.yaml")]
    command += ["--num_processes", "2", "--mixed_precision", "no", str(HERE / "launched.py"), str(folder), name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(**env), timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [found] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"processes"')]
    return dict(found)


def run_suite(suite: str, folder: Path, *, num_ranks: int = 2, limit_s: float) -> list[dict[str, Any]]:
    """Results of every rank, by the names of the runs."""
    done = torchrun(HERE / "ranks.py", folder, suite, num_ranks=num_ranks, limit_s=limit_s)
    files = [folder / f"rank{rank}.pt" for rank in range(num_ranks)]
    assert all(file.exists() for file in files), done.stdout[-6000:]
    return [torch.load(file) for file in files]
