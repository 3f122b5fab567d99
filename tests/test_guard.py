"""A step whose loss or gradient is not finite is not made: the run ends, and can go on once the cause is gone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conftest import TrainerFactory
from safetensors.torch import load_file
from torch import Tensor
from transformers.trainer_utils import get_last_checkpoint

from sdpo import NonFiniteLossError, SDPOTrainer
from sdpo.checkpoint import UNFINISHED
from sdpo.completion_log import files_in


def reward_by_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(text.split()) % 2) for text in completions]


SETTINGS: dict[str, Any] = {
    "script": None,
    "reward_funcs": reward_by_length,
    "prompts": [f"w{i} w{i + 1}" for i in range(6)],
    "save_strategy": "steps",
    "save_steps": 100,
    "max_steps": 4,
    "learning_rate": 1e-2,
}
LOGGED = {"log_completions": True, "num_completions_to_print": 0}
CASES: dict[str, dict[str, Any]] = {
    "a block a step": {},
    "in the middle of a block": {"num_iterations": 4},
    "in the middle of a log": {"logging_steps": 2, "num_iterations": 4, "logging_nan_inf_filter": False},
    "the second of two microbatches": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "earlier successes": {"demonstration_buffer_size": 8, "prompts": ["w1 w2"], "distillation_weight": 0.5},
    "a log of completions": {"distillation_weight": 0.5, **LOGGED},
    "a log of a block in two steps": {"distillation_weight": 0.5, "steps_per_generation": 2, **LOGGED},
}


def poison(trainer: SDPOTrainer, *, step: int, value: float = math.nan, rows: slice = slice(None)) -> None:
    """The student's hidden states of some sequences are `value` in that step of training, whatever the weights are."""
    norm = trainer.model.model.norm

    def spoil(module: Any, inputs: Any, output: Tensor) -> Tensor:
        if module.training and trainer.state.global_step == step - 1:
            output = output.clone()
            output[rows] = value
        return output

    norm.register_forward_hook(spoil)


def poison_gradient(trainer: SDPOTrainer, *, step: int) -> None:
    def spoil(gradient: Tensor) -> Tensor:
        return gradient * math.inf if trainer.state.global_step == step - 1 else gradient

    trainer.model.model.norm.weight.register_hook(spoil)


def stopped(trainer: SDPOTrainer) -> NonFiniteLossError:
    with pytest.raises(NonFiniteLossError) as caught:
        trainer.train()
    return caught.value


def weights(trainer: SDPOTrainer) -> dict[str, Tensor]:
    found = {f"student {n}": p.detach().clone() for n, p in trainer.model.named_parameters()}
    for part, _ in trainer.teacher.parts if trainer.teacher else []:
        found |= {f"teacher {n}": p.detach().clone() for n, p in part.named_parameters()}
    return found


def logs(trainer: SDPOTrainer) -> list[dict[str, Any]]:
    kept = [log for log in trainer.state.log_history if "loss" in log]
    return [{n: v for n, v in log.items() if not n.startswith("time/")} for log in kept]


def completions(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return {step: pq.read_table(path).to_pylist() for step, path in files_in(folder / "completions").items()}


@pytest.mark.parametrize("spoil", [poison, poison_gradient])
def test_the_checkpoint_has_the_weights_of_before_the_step(
    make_trainer: TrainerFactory, tmp_path: Path, spoil: Callable[..., None]
) -> None:
    before = make_trainer(**{**SETTINGS, "max_steps": 2}, output_dir=str(tmp_path / "before"))
    before.train()
    trainer = make_trainer(**SETTINGS)
    spoil(trainer, step=3)
    error = stopped(trainer)
    assert error.step == 3 and error.checkpoint == tmp_path / "run" / "checkpoint-2"
    what = "loss" if spoil is poison else "gradient"
    assert f"The {what} of step 3 is not finite" in str(error) and str(error.checkpoint) in str(error)
    saved = load_file(error.checkpoint / "model.safetensors")
    expected = dict(before.model.named_parameters())
    assert saved and all(torch.equal(value, expected[name]) for name, value in saved.items())
    assert all(torch.equal(value, weights(before)[name]) for name, value in weights(trainer).items())
    assert get_last_checkpoint(str(tmp_path / "run")) == str(error.checkpoint)
    assert not (tmp_path / "run" / UNFINISHED).exists()


@pytest.mark.parametrize("case", CASES)
def test_once_the_cause_is_gone_the_run_goes_on_as_if_nothing_had_been(
    make_trainer: TrainerFactory, tmp_path: Path, case: str
) -> None:
    """Weights of student and teacher and every logged number, bitwise."""
    settings = {**SETTINGS, **CASES[case]}
    straight = make_trainer(**settings, output_dir=str(tmp_path / "straight"))
    straight.train()
    spoilt = make_trainer(**settings)
    poison(spoilt, step=2)
    assert stopped(spoilt).step == 2
    resumed = make_trainer(**settings)
    resumed.train(resume_from_checkpoint=True)
    assert logs(resumed) == logs(straight)
    expected = weights(straight)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())
    assert resumed.earlier.by_prompt == straight.earlier.by_prompt
    assert completions(tmp_path / "run") == completions(tmp_path / "straight")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_rows_at_fault_are_in_a_file_and_no_others(
    make_trainer: TrainerFactory, tmp_path: Path, value: float
) -> None:
    """Two prompts of two rows each; the sequence of the first is spoilt."""
    prompts = ["w10 w11", "w12 w13"]
    trainer = make_trainer(
        prompts=prompts,
        num_generations=2,
        max_steps=2,
        shuffle_dataset=False,
        rewards=(1.0, 0.0, 1.0, 0.0),
        distillation_weight=0.5,
        include_environment_feedback=True,
        columns={"privileged_context": ["w30", "w31"]},
    )
    trainer.train()  # a clean run changes nothing about the next
    is_shared = trainer.block.batches[0].student.is_shared
    poison(trainer, step=1, value=value, rows=slice(0, 1 if is_shared else 2))
    error = stopped(trainer)
    found = json.loads((tmp_path / "run" / "non_finite_step1.json").read_text())
    assert error.rows_file == tmp_path / "run" / "non_finite_step1.json" and found["rows"] == error.rows
    assert found["step"] == 1 and found["not_finite"] == "loss" and found["losses_by_rank"] == [["nan"]]
    assert [row["row"] for row in error.rows] == [0, 1]
    assert [row["reward"] for row in error.rows] == [1.0, 0.0]
    assert all("w10 w11" in row["prompt"] and row["feedback"] == "w30" for row in error.rows)
    assert error.rows[0]["completion"] == "w1 w2 w3 <eos>" and "w30" in error.rows[1]["teacher_prompt"]
    assert "w10 w11" in str(error) and "2 of all ranks" in str(error)


def test_a_gradient_that_is_not_finite_names_the_rows_of_the_step(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(gradient_accumulation_steps=2, per_device_train_batch_size=2)
    poison_gradient(trainer, step=1)
    error = stopped(trainer)
    assert [(row["microbatch"], row["row"]) for row in error.rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_under_a_scaler_of_gradients_a_gradient_that_is_not_finite_is_skipped(make_trainer: TrainerFactory) -> None:
    """fp16: it halves the scale and goes on, which is how it finds the scale."""
    trainer = make_trainer(**{**SETTINGS, "max_steps": 3})
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    poison_gradient(trainer, step=2)
    trainer.train()
    assert trainer.state.global_step == 3 and trainer.accelerator.scaler.get_scale() == 2.0
    assert all(value.isfinite().all() for value in weights(trainer).values())
    poison(trainer, step=2)
    assert "The loss of step 2" in str(stopped(trainer))


@pytest.mark.parametrize(
    ("step", "settings", "reason"),
    [(2, {"save_strategy": "no"}, "save_strategy='no'"), (1, {}, "No step was made before it")],
)
def test_without_a_checkpoint_the_error_says_why_and_the_rows_are_kept(
    make_trainer: TrainerFactory, tmp_path: Path, step: int, settings: dict[str, Any], reason: str
) -> None:
    trainer = make_trainer(**{**SETTINGS, **settings})
    poison(trainer, step=step)
    error = stopped(trainer)
    assert error.checkpoint is None and reason in str(error)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [f"non_finite_step{step}.json"]


def test_no_older_checkpoint_goes_for_that_of_the_stop(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    """The weights may have been spoilt before; save_total_limit counts again afterwards."""
    trainer = make_trainer(**{**SETTINGS, "save_steps": 2, "save_total_limit": 1, "max_steps": 4})
    poison(trainer, step=4)
    stopped(trainer)
    names = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert names == {"checkpoint-2", "checkpoint-3"} and trainer.args.save_total_limit == 1
