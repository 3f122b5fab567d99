"""DeepSpeed ZeRO-2 and ZeRO-3 on two ranks over gloo; runs with the Python that DeepSpeed is installed for."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from cases import SAME_UPDATE, TOKENIZER, trained
from conftest import make_model
from launch import HERE, environment, launched_with, torchrun
from safetensors.torch import load_file
from suites import SUITES, ZERO_CASES, ZERO_KINDS, ZERO_PARTS, in_parts
from test_two_ranks import assert_same, assert_same_numbers

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: make slow"),
]
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of the environment. An operator is compiled at the first start; a killed start leaves a lock there."""
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path_factory.mktemp("extensions"))}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, on_cpus: dict[str, str]) -> Results:
    folder = tmp_path_factory.mktemp("zero")
    command = [sys.executable, str(HERE / "forked.py"), str(folder), "zero", "2"]
    env = environment(**on_cpus)
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1100, check=False)
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


@pytest.mark.parametrize("kind", ZERO_KINDS)
@pytest.mark.parametrize("name", ZERO_PARTS)
def test_evaluations_and_a_resumed_run_have_the_numbers_of_one_process(
    ranks: Results, kind: str, name: str, tmp_path: Path
) -> None:
    """Weights of student and teacher, logs and evaluations; the saved model is the student, whole."""
    expected = in_parts("ddp", ZERO_PARTS[name], tmp_path / "run", name="run")
    straight, resumed = (values(ranks, f"{kind}: {name}, {part}") for part in ("straight", "resumed"))
    for found in (*straight, *resumed):
        assert_same(found, expected)
        assert len(found["evaluations"]) == 2
        for log, other in zip(found["evaluations"], expected["evaluations"], strict=True):
            assert_same_numbers(log, other)
    file = "model.safetensors" if ZERO_PARTS[name].lora is None else "adapter_model.safetensors"
    for found in (straight[0], resumed[0]):
        saved = load_file(str(Path(found["model"]) / file))
        assert saved
        for parameter, value in saved.items():
            own = parameter.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")
            assert torch.equal(value, found["weights"][f"student {own}"]), parameter


@pytest.mark.parametrize("kind", ZERO_KINDS)
def test_accelerate_launch_takes_the_file(kind: str, tmp_path: Path, on_cpus: dict[str, str]) -> None:
    """On CPUs, in float32 as `test_more_ranks` does it."""
    assert launched_with(kind, tmp_path, **on_cpus) == {"processes": 2, "parallelism": kind, "steps": 2}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_file_for_deepspeed_is_taken_with_a_model_given_by_name(
    stage: int, tmp_path: Path, on_cpus: dict[str, str]
) -> None:
    """What is "auto" in it is the Trainer's; while transformers knows of it, it loads models in pieces."""
    zero = {"stage": stage, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    file = tmp_path / "zero.json"
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    file.write_text(json.dumps({"zero_optimization": zero, **dict.fromkeys(batch, "auto")}))
    make_model(TOKENIZER).save_pretrained(tmp_path / "model")
    done = torchrun(HERE / "launched.py", tmp_path, file, limit_s=280, **on_cpus)
    assert done.returncode == 0, done.stdout[-6000:]
    [found] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"processes"')]
    assert found == {"processes": 2, "parallelism": f"zero{stage}", "steps": 2}
