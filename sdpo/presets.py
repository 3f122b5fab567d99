"""The settings of the paper's runs as named presets, each value with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

from sdpo.config_rules import check_choice

PresetName = Literal["no_feedback", "rich_feedback", "test_time"]


class _Preset(NamedTuple):
    """Questions of a block, questions of an optimizer step, and what else differs between the sections."""

    questions: int
    questions_per_step: int
    settings: Mapping[str, Any]


# Hyper-parameters that all runs of arXiv 2601.20802 v2 share.
_PAPER: Mapping[str, Any] = {
    "weight_decay": 0.01,  # hyper-parameters of the paper: AdamW, the default optimizer here
    "max_grad_norm": 1.0,  # hyper-parameters of the paper
    "temperature": 1.0,  # hyper-parameters of the paper
    "max_prompt_length": 2048,  # hyper-parameters of the paper
    "max_completion_length": 8192,  # hyper-parameters of the paper
    "chat_template_kwargs": {"enable_thinking": False},  # hyper-parameters of the paper: thinking off
    "distillation_weight": 1.0,  # eq. 1: the distillation alone
    "distillation_mode": "topk_logits",  # eq. 11: the student's top k ...
    "distillation_add_tail": True,  # eq. 11: ... and one bucket for the rest
    "distillation_is_clip": 2.0,  # authors' code: is_clip
    "teacher_model_kind": "ema",  # authors' code: teacher_regularization
    "success_reward_threshold": 0.5,  # authors' code, effective value
    "remove_thinking_from_demonstration": True,  # authors' code, effective value
    "dont_reprompt_on_self_success": True,  # authors' code; the attempt is never shown to its own teacher
    "max_reprompt_len": 10240,  # authors' code
    "vllm_importance_sampling_mode": "token_truncate",  # sampler correction of the paper: truncated, one a token
    "vllm_importance_sampling_cap": 2.0,  # sampler correction of the paper: cap 2
}

_PRESETS: Mapping[str, _Preset] = {
    "no_feedback": _Preset(
        questions=32,  # sec. 3
        questions_per_step=32,  # sec. 3: mini-batch 32, one optimizer step a block
        settings={
            "num_generations": 8,  # sec. 3
            "distillation_topk": 100,  # sec. 3
            "distillation_alpha": 0.5,  # sec. 3: Jensen-Shannon
            "teacher_update_rate": 0.05,  # sec. 3
            "learning_rate": 1e-5,  # sec. 3
            "lr_scheduler_type": "constant_with_warmup",  # constant rate after the warm-up
            "warmup_steps": 10,  # sec. 3
            "include_environment_feedback": False,  # sec. 3: no text feedback
        },
    ),
    "rich_feedback": _Preset(
        questions=32,  # sec. 4
        questions_per_step=1,  # sec. 4: mini-batch 1, so 32 optimizer steps a block
        settings={
            "num_generations": 8,  # sec. 4
            "distillation_topk": 20,  # sec. 4
            "distillation_alpha": 1.0,  # sec. 4: reverse KL
            "teacher_update_rate": 0.01,  # sec. 4
            "learning_rate": 1e-6,  # sec. 4
            "lr_scheduler_type": "constant",  # constant rate
            "warmup_steps": 0,  # sec. 4
            "include_environment_feedback": True,  # sec. 4, and the effective value of the authors' code
            "environment_feedback_only_without_solution": True,  # authors' code, effective value
        },
    ),
    "test_time": _Preset(
        questions=1,  # sec. 5: one question at a time
        questions_per_step=1,  # sec. 5
        settings={
            "num_generations": 16,  # sec. 5
            "distillation_topk": 20,  # sec. 5
            "distillation_alpha": 1.0,  # sec. 5: reverse KL
            "teacher_update_rate": 0.01,  # sec. 5
            "learning_rate": 1e-6,  # sec. 5
            "lr_scheduler_type": "constant",  # constant rate
            "warmup_steps": 0,  # sec. 5
            "include_environment_feedback": True,  # authors' code; before the first success nothing else teaches
            "environment_feedback_only_without_solution": True,  # authors' code, effective value
        },
    ),
}


def build_preset(config_class: Any, name: PresetName, overrides: Mapping[str, Any]) -> Any:
    """The config of a preset, of class `config_class`; see `SDPOConfig.preset`.

    Raises:
        ValueError: no such preset, or an optimizer step that the completions in flight at once do not divide.
    """
    check_choice("preset", name, get_args(PresetName))
    preset = _PRESETS[name]
    values = {**_PAPER, **preset.settings, **overrides}
    for void in _void_settings(values) - overrides.keys():
        values.pop(void, None)
    group = values["num_generations"]
    if not {"generation_batch_size", "steps_per_generation"} & overrides.keys():
        values["generation_batch_size"] = preset.questions * group
    config = config_class(**values)

    at_once = config.per_device_train_batch_size * config.world_size
    step = min(preset.questions_per_step * group, config.generation_batch_size or 0)
    accumulation = config.gradient_accumulation_steps
    if "gradient_accumulation_steps" not in overrides:
        if step % at_once:
            raise ValueError(
                f"Preset {name!r} takes {step} completions an optimizer step, which per_device_train_batch_size "
                f"({config.per_device_train_batch_size}) * {config.world_size} processes = {at_once} does not "
                f"divide. Set per_device_train_batch_size so that it does, or gradient_accumulation_steps."
            )
        accumulation = step // at_once
    sync_steps = config.teacher_sync_steps
    if config.teacher_model_kind == "ema" and "teacher_sync_steps" not in overrides:
        microbatches = (config.steps_per_generation or 1) * config.num_iterations
        sync_steps = max(1, microbatches // accumulation)
    steps: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "teacher_sync_steps": sync_steps}
    return replace(config, **steps)


def _void_settings(values: Mapping[str, Any]) -> set[str]:
    """Names of a preset's settings that the other `values` leave without effect."""
    void: set[str] = set()
    if values["teacher_model_kind"] in ("base", "live"):
        void.add("teacher_update_rate")
    if values["distillation_mode"] != "topk_logits":
        void |= {"distillation_topk", "distillation_add_tail"}
    if values["distillation_mode"] == "sampled_token":
        void.add("distillation_alpha")
    if not values["include_environment_feedback"]:
        void.add("environment_feedback_only_without_solution")
    return void
