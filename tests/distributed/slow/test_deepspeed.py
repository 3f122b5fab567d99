"""DeepSpeed ZeRO-2 and ZeRO-3 on two ranks over gloo; runs with the Python that DeepSpeed is installed for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from cases import SAME_UPDATE, trained
from launch import HERE, environment
from suites import SUITES, ZERO_CASES, ZERO_KINDS
from test_two_ranks import assert_same

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: make slow"),
]
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("zero")
    command = [sys.executable, str(HERE / "forked.py"), str(folder), "zero", "2"]
    # An operator that is compiled at the first start goes to a folder of this launch: a killed start leaves a lock.
    more = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment(**more), timeout=1100, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def values(ranks: Results, name: str) -> list[Any]:
    assert [rank[name].get("trace") for rank in ranks] == [None, None]
    return [rank[name]["value"] for rank in ranks]


@pytest.mark.parametrize("kind", ZERO_KINDS)
@pytest.mark.parametrize("name", ZERO_CASES)
def test_zero_makes_the_update_of_one_process(ranks: Results, kind: str, name: str, tmp_path: Path) -> None:
    expected = trained(SAME_UPDATE[name], tmp_path)
    for found in values(ranks, f"{kind}: {name}"):
        assert_same(found, expected)


@pytest.mark.parametrize("run", [name for name in SUITES["zero"] if "sampling" in name])
def test_ranks_sample_different_completions_of_one_prompt(ranks: Results, run: str) -> None:
    first, second = (found["completions"] for found in values(ranks, run))
    assert len(first) == len(second) == 8
    assert len({tuple(ids) for ids in first[:4] + second[:4]}) >= 7
