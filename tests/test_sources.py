"""What a run learns from: rewards, and the dataset's columns for the teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TrainerFactory
from test_trainer import Hooks


def teacher_texts(hooks: Hooks, trainer: Any) -> list[str]:
    """The teacher's prompts that a hook was given, completions included, block after block."""
    return [
        trainer.tokenizer.tokenizer.decode(ids[mask.bool()])
        for payload in hooks.payloads["contexts"]
        for ids, mask in zip(payload["teacher_input_ids"], payload["teacher_attention_mask"], strict=True)
    ]


TEMPLATES = {
    "reprompt_template": "{prompt} {solution}{feedback}",
    "solution_template": "{successful_previous_attempt}",
}


def test_a_run_on_solutions_of_the_dataset_needs_no_rewards_and_no_siblings(make_trainer: TrainerFactory) -> None:
    hooks = Hooks()
    trainer = make_trainer(
        columns={"worked": ["w30 w31"]},
        reward_funcs=[],
        num_generations=1,
        per_device_train_batch_size=1,
        demonstration_column="worked",
        trainer_kwargs={"callbacks": [hooks]},
        **TEMPLATES,
    )
    before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    trainer.train()
    # prompt, solution, then the scripted completion
    assert teacher_texts(hooks, trainer) == ["w10 w11 w12 w30 w31 w1 w2 w3 <eos>"]
    assert not torch.equal(before, torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert trainer.state.log_history[0]["self_distillation/solution_column_fraction"] == 1.0


def test_the_column_teacher_prompt_is_what_the_teacher_is_asked(make_trainer: TrainerFactory) -> None:
    hooks = Hooks()
    trainer = make_trainer(
        columns={"teacher_prompt": ["w20 w21"]},
        rewards=(0.0,),
        trainer_kwargs={"callbacks": [hooks]},
        remove_unused_columns=True,
        **TEMPLATES,
    )
    trainer.train()
    assert teacher_texts(hooks, trainer)[1] == "w20 w21 w4 w5 <eos>"
    assert trainer.state.log_history[0]["self_distillation/reprompt_sample_fraction"] == 1.0


def test_an_earlier_success_comes_back_with_the_checkpoint(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    # the first block has one success, "w4 w5"; later blocks have none
    rewards = [0.0, 1.0, 0.0, 0.0, *[0.0] * 100]
    settings = {"demonstration_buffer_size": 1, "save_strategy": "steps", "save_steps": 1, **TEMPLATES}
    hooks = Hooks()
    trainer = make_trainer(rewards=rewards, max_steps=2, trainer_kwargs={"callbacks": [hooks]}, **settings)
    trainer.train()
    straight = teacher_texts(hooks, trainer)[4:]
    assert straight[0] == "w10 w11 w12 w4 w5 w1 w2 w3 <eos>"
    assert trainer.state.log_history[1]["self_distillation/earlier_success_fraction"] == 1.0

    hooks = Hooks()
    resumed = make_trainer(rewards=[0.0], max_steps=2, trainer_kwargs={"callbacks": [hooks]}, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert teacher_texts(hooks, resumed) == straight


def test_evaluation_neither_reads_nor_writes_earlier_successes(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(rewards=[1.0], demonstration_buffer_size=4)
    trainer.evaluate(trainer.train_dataset)
    assert trainer.earlier.by_prompt == {}


def test_groups_of_one_without_anything_to_show_are_refused(make_trainer: TrainerFactory) -> None:
    alone = {"num_generations": 1, "per_device_train_batch_size": 1}
    with pytest.raises(ValueError, match="num_generations=1 leaves the teacher nothing to be shown"):
        make_trainer(**alone)
    make_trainer(**alone, include_environment_feedback=True)
    make_trainer(**alone, dont_reprompt_on_self_success=False)
    make_trainer(**alone, demonstration_buffer_size=1)
    make_trainer(**alone, columns={"teacher_prompt": ["w1"]})


def test_a_teacher_that_is_shown_nothing_is_said(make_trainer: TrainerFactory, caplog: Any) -> None:
    from transformers.utils import logging

    logging.enable_propagation()
    make_trainer(use_successful_as_teacher=False)
    logging.disable_propagation()
    assert "no row is distilled" in caplog.text


def test_a_teacher_prompt_that_does_not_fit_its_prompt_is_found_at_construction(make_trainer: TrainerFactory) -> None:
    with pytest.raises(ValueError, match="teacher_prompt must be a string where the prompt is one"):
        make_trainer(columns={"teacher_prompt": [[{"role": "user", "content": "w1"}]]})
    with pytest.raises(ValueError, match="demonstration_column='worked' is no column of train_dataset"):
        make_trainer(demonstration_column="worked")
