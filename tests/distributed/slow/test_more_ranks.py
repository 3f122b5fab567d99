"""Four ranks, the launchers with the configuration files that are shipped, and the demo on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))
from cases import SAME_UPDATE, trained
from launch import CONFIGS, HERE, environment, launched_with, run_suite
from test_two_ranks import assert_same, assert_same_numbers

pytestmark = pytest.mark.timeout(900)
ROOT = HERE.parent.parent


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_suite("four ranks", tmp_path_factory.mktemp("four"), num_ranks=4, limit_s=500)


def test_four_ranks_make_the_update_of_one(four: list[dict[str, Any]], tmp_path: Path) -> None:
    assert len(four[0]) == 8
    for name in four[0]:
        expected = trained(SAME_UPDATE[name.split(": ")[1]], tmp_path / name)
        for rank in four:
            assert "trace" not in rank[name], rank[name]["trace"]
            assert_same(rank[name]["value"], expected)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_accelerate_launch_takes_the_file(name: str, tmp_path: Path) -> None:
    """On CPUs: without GPUs accelerate leaves float32 alone, and the run says that it has two processes."""
    assert launched_with(name, tmp_path) == {"processes": 2, "parallelism": name, "steps": 2}


def test_the_file_for_several_machines_is_that_for_one() -> None:
    one, several = (yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()) for name in ("fsdp2", "fsdp2_4_nodes"))
    assert several["num_processes"] == 4 * one["num_processes"]
    differing = {name for name in several if several[name] != one.get(name)}
    machines = {"main_process_ip", "main_process_port", "same_network", "rdzv_backend"}
    assert differing == {"num_machines", "num_processes", *machines}


def test_the_demo_on_two_ranks_has_the_numbers_of_one(tmp_path: Path) -> None:
    """Of two steps and the accuracies, with completions that depend on a row's place."""
    found = {}
    for world_size in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
        command += [str(HERE / "demo.py"), str(tmp_path / str(world_size)), str(64 // world_size)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert done.stdout.count("held-out accuracy before") == 1
        found[world_size] = json.loads((tmp_path / str(world_size) / "logs.json").read_text())
    for log, other in zip(found[2], found[1], strict=True):
        assert_same_numbers(log, other)
