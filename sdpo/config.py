"""The settings of a run: flat fields, every check at construction, and frozen views of them for the layers below.

An option that cannot take effect raises. Two kinds of value are let through on purpose, so that a script can switch a
part off for a comparison and keep the rest of its command line: what tunes the distillation where its weight is 0, and
what sizes vLLM where it is not used.
"""
# ruff: noqa: RUF009, RUF036  (`_setting` is short for dataclasses.field; HfArgumentParser reads `None | str | list`)

from __future__ import annotations

import copy
import difflib
import functools
import json
import math
import string
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from transformers import GenerationConfig, TrainingArguments
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from sdpo.types import (
    DistillationMode,
    ImportanceSamplingLevel,
    LossType,
    ObjectiveSettings,
    RepromptSettings,
    SamplingSettings,
    ScaleRewards,
    TeacherKind,
    TeacherSettings,
)

TeacherDtype = Literal["float32", "bfloat16", "float16"]
PresetName = Literal["no_feedback", "rich_feedback", "test_time"]

# Heading of the documentation -> the first field under it. A field belongs to the last heading begun before it.
SECTIONS: Mapping[str, str] = {
    "Changed defaults of TrainingArguments": "learning_rate",
    "Policy objective": "beta",
    "Distillation": "distillation_weight",
    "Teacher": "teacher_model_kind",
    "Reprompting": "use_successful_as_teacher",
    "Diagnostics": "diagnostics_warning_interval",
    "Model and data": "model_init_kwargs",
    "Generation": "num_generations",
    "vLLM": "use_vllm",
    "Training": "num_iterations",
}

# What other implementations call it -> what to use here.
_NAMES_ELSEWHERE: Mapping[str, str] = {
    "alpha": "`distillation_alpha`",
    "is_clip": "`distillation_is_clip`",
    "topk": "`distillation_topk`",
    "distill_topk": "`distillation_topk`",
    "add_tail": "`distillation_add_tail`",
    "full_logit_distillation": '`distillation_mode` ("full_logits", or "topk_logits" with `distillation_topk`)',
    "enabled": "`distillation_weight` (0 switches the distillation off)",
    "loss_mode": "`distillation_weight` (1: distillation only, 0: policy gradient only)",
    "sdpo_policy_loss_mode": "`distillation_weight` (1: distillation only, between 0 and 1: a blend)",
    "teacher_mode": "`teacher_model_kind`",
    "teacher_kind": "`teacher_model_kind`",
    "teacher_regularization": "`teacher_model_kind`",
    "ema_rate": "`teacher_update_rate`",
    "ema_update_rate": "`teacher_update_rate`",
    "ema_decay": "`teacher_update_rate` (1 - decay)",
    "teacher_update_steps": "`teacher_sync_steps`",
    "max_reprompt_length": "`max_reprompt_len`",
    "reprompt_truncation": (
        "`max_reprompt_len` (demonstration and feedback are shortened first, the question never is)"
    ),
    "dont_reprompt": "`dont_reprompt_on_self_success`",
    "success_threshold": "`success_reward_threshold`",
    "remove_thinking": "`remove_thinking_from_demonstration`",
    "include_feedback": "`include_environment_feedback`",
    "feedback_only_without_solution": "`environment_feedback_only_without_solution`",
    "apply_chat_template_kwargs": "`chat_template_kwargs`",
    "clip_ratio": "`epsilon`",
    "clip_ratio_low": "`epsilon`",
    "clip_ratio_high": "`epsilon_high`",
    "kl_coef": "`beta`",
    "kl_loss_coef": "`beta`",
    "loss_agg_mode": "`loss_type`",
    "group_size": "`num_generations`",
    "num_rollouts": "`num_generations`",
    "rollout_n": "`num_generations`",
    "ppo_epochs": "`num_iterations`",
    "max_new_tokens": "`max_completion_length`",
    "max_response_length": "`max_completion_length`",
    "rollout_is": "`vllm_importance_sampling_correction`",
    "rollout_is_threshold": "`vllm_importance_sampling_cap`",
    "vllm_importance_sampling_clip_max": "`vllm_importance_sampling_cap`",
}

_Config = TypeVar("_Config", bound=type)


def _setting(default: Any, help_text: str) -> Any:
    """A dataclass field with its help, the one source of the command line's help and of the documentation."""
    return field(default=default, metadata={"help": help_text})


def _explain_unknown_names(cls: _Config) -> _Config:
    """Class decorator: an unknown keyword of `__init__` gets a TypeError that says what to use instead."""
    generated = cls.__init__  # type: ignore[misc]
    known = [f.name for f in fields(cls) if f.init]

    def explain(name: str) -> str:
        close = difflib.get_close_matches(name, known, n=1)
        meant = _NAMES_ELSEWHERE.get(name) or (f"`{close[0]}`" if close else None)
        return f"{cls.__name__} has no field `{name}`" + (f": did you mean {meant}?" if meant else ".")

    @functools.wraps(generated)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise TypeError("\n".join(map(explain, unknown)))
        generated(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


@_explain_unknown_names
@dataclass
class SDPOConfig(TrainingArguments):
    """Settings of `SDPOTrainer`: those of `transformers.TrainingArguments` and the fields below.

    Every value is checked at construction. The layers below never see the config itself but one of its frozen views:
    `sampling`, `reprompt`, `objective`, `teacher`.

    Raises:
        TypeError: a keyword is no field; the message names the field meant.
        ValueError: a value is out of its range or of its choices, two settings contradict each other, a setting cannot
            take effect, or a template holds a brace that is no placeholder.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
    ]

    # --- changed defaults of TrainingArguments ---------------------------------------------------------------------

    learning_rate: float = _setting(5e-5, "Peak learning rate of the optimizer.")
    logging_steps: float = _setting(
        10,
        "Optimizer steps between two log entries; a value in [0, 1) is a share of all steps of the run.",
    )
    gradient_checkpointing: bool = _setting(
        True,
        "Recompute activations in the backward pass: less memory, more time. Newer transformers call it "
        "`activation_checkpointing`, which wins where it is set.",
    )
    bf16: bool | None = _setting(
        None,
        "Mixed precision in bfloat16. None: on where `fp16` is off and there is an accelerator that can; off on a "
        "CPU, where it would only change the numerics.",
    )
    average_tokens_across_devices: bool = _setting(True, "Count the tokens of an optimizer step over all processes.")
    report_to: None | str | list[str] = _setting(
        "none",
        "Experiment trackers to report to: a name, several, 'all' or 'none'.",
    )
    remove_unused_columns: bool = _setting(
        False,
        "Drop dataset columns that nothing uses. Columns that a reward function names are kept either way.",
    )

    # --- policy objective ------------------------------------------------------------------------------------------

    beta: float = _setting(
        0.0,
        "Coefficient of the KL to the initial policy (k3 estimator), part of the policy term. 0: no reference is "
        "held. Needs `distillation_weight` below 1, since the policy term is weighted by 1 minus it.",
    )
    epsilon: float = _setting(0.2, "Lower clip range: ratios below 1 - epsilon stop being pushed down.")
    epsilon_high: float | None = _setting(
        None,
        "Upper clip range: ratios above 1 + epsilon_high stop being pushed up. None: equal to `epsilon`. DAPO "
        "suggests 0.28.",
    )
    importance_sampling_level: ImportanceSamplingLevel = _setting(
        "token",
        "'token': one importance ratio a token. 'sequence': the exponential of the mean log-ratio, one a completion "
        "(GSPO).",
    )
    reward_weights: list[float] | None = _setting(None, "One weight for each reward function. None: each counts 1.")
    scale_rewards: str = _setting(
        "group",
        "What advantages are divided by. 'group' (or true): standard deviation of the prompt's group. 'batch': of "
        "the whole batch. 'none' (or false): no division.",
    )

    # --- distillation ----------------------------------------------------------------------------------------------

    distillation_weight: float = _setting(
        1.0,
        "w in (1 - w) * policy + w * distillation. 1: self-distillation alone. 0: policy gradient alone; then no "
        "teacher is built or run.",
    )
    distillation_alpha: float = _setting(
        1.0,
        "Divergence. 0: forward KL(teacher, student). 1: reverse KL(student, teacher). Between: (1 - a) KL(S, M) + a"
        " KL(T, M) with the mixture M = (1 - a) S + a T; 0.5 is Jensen-Shannon.",
    )
    distillation_mode: DistillationMode = _setting(
        "sampled_token",
        "Support of the divergence. 'sampled_token': the token that was sampled (needs distillation_alpha 1). "
        "'full_logits': the vocabulary. 'topk_logits': the student's `distillation_topk` likeliest tokens.",
    )
    distillation_topk: int | None = _setting(
        None,
        "Number of tokens in the support. Required with 'topk_logits', refused with other modes.",
    )
    distillation_is_clip: float | None = _setting(
        2.0,
        "Cap of the importance weight exp(logp - logp_old), without gradient, on the distillation loss of a token "
        "where rollouts are reused. None: no weight.",
    )
    distillation_add_tail: bool = _setting(
        False,
        "With 'topk_logits'. True: the mass outside the top k is one more bucket. False: the top k are renormalized.",
    )

    # --- teacher ---------------------------------------------------------------------------------------------------

    teacher_model_kind: TeacherKind = _setting(
        "ema",
        "Weights of the teacher. 'ema': moving average of the student's. 'live': the student's own. 'base': the "
        "initial student's, frozen. 'trust_region': logits (1 - r) initial + r current (paper, eq. 10).",
    )
    teacher_update_rate: float = _setting(
        0.05,
        "r in t <- (1 - r) t + r s for 'ema', the share of the current student's logits for 'trust_region'.",
    )
    teacher_sync_steps: int = _setting(1, "Optimizer steps between two updates of the moving average.")
    teacher_dtype: TeacherDtype | None = _setting(
        None,
        "Dtype of the weights that the teacher has for itself, in its forward. None: the student's. The moving "
        "average is kept in float32 whatever it is.",
    )

    # --- reprompting -----------------------------------------------------------------------------------------------

    use_successful_as_teacher: bool = _setting(True, "Show the teacher a successful completion of the same prompt.")
    success_reward_threshold: float = _setting(
        1.0,
        "Weighted reward from which a completion is a success. One without any valid reward never is.",
    )
    dont_reprompt_on_self_success: bool = _setting(
        True,
        "A completion is not its own demonstration; a success may still be shown another success of its group.",
    )
    max_reprompt_len: int = _setting(10240, "Token budget of the teacher's prompt.")
    reprompt_template: str = _setting(
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        "The teacher's user turn. Placeholders: prompt (required), solution, feedback. Literal braces are doubled.",
    )
    solution_template: str = _setting(
        "\nCorrect solution:\n\n{successful_previous_attempt}\n\n",
        "What stands for solution in `reprompt_template`. Placeholder: successful_previous_attempt.",
    )
    feedback_template: str = _setting(
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        "What stands for feedback in `reprompt_template`. Placeholder: feedback_raw.",
    )
    include_environment_feedback: bool = _setting(
        False,
        "Show the teacher the text about the attempt: from a reward function that returns Score, else from the "
        "column privileged_context.",
    )
    environment_feedback_only_without_solution: bool = _setting(
        False,
        "Show that text only where there is no demonstration.",
    )
    remove_thinking_from_demonstration: bool = _setting(
        False,
        "Cut <think>...</think> out of the demonstration, also where the chat template opened the block.",
    )

    # --- diagnostics -----------------------------------------------------------------------------------------------

    diagnostics_warning_interval: int = _setting(
        10,
        "Repeat the warning about a degenerate run every so many such steps in a row. 0: never.",
    )
    diagnostics_flat_tolerance: float = _setting(
        1e-8,
        "At or below it the spread of rewards, or the share of reprompted rows, counts as zero.",
    )

    # --- model and data --------------------------------------------------------------------------------------------

    model_init_kwargs: dict[str, Any] | str | None = _setting(
        None,
        "Keywords of from_pretrained where the model is given by name; JSON on the command line. Its revision is "
        "also that of the processing class. Never changed.",
    )
    trust_remote_code: bool = _setting(False, "Let models and tokenizers run code that comes with them from the Hub.")
    disable_dropout: bool = _setting(True, "Set every dropout of the model to 0.")
    max_prompt_length: int | None = _setting(
        512,
        "Tokens of the student's prompt; a longer one loses its left end. None: no limit.",
    )
    shuffle_dataset: bool = _setting(True, "Draw the training prompts in random order.")

    # --- generation ------------------------------------------------------------------------------------------------

    num_generations: int = _setting(8, "Completions a prompt in training: the size of a group. Divides a block.")
    num_generations_eval: int | None = _setting(None, "Completions a prompt in evaluation. None: `num_generations`.")
    max_completion_length: int | None = _setting(
        256,
        "Most tokens of a completion; a longer one is truncated there. A number is required.",
    )
    ds3_gather_for_generation: bool = _setting(
        True,
        "DeepSpeed ZeRO-3: gather the whole weights to generate. False: slower, for models that do not fit on one "
        "device; not with vLLM.",
    )
    generation_batch_size: int | None = _setting(
        None,
        "Completions of a block, over all processes. None: per_device_train_batch_size * processes * "
        "steps_per_generation.",
    )
    steps_per_generation: int | None = _setting(
        None,
        "Microbatches a block is cut into. None: from `generation_batch_size` where that is set, else "
        "gradient_accumulation_steps.",
    )
    temperature: float = _setting(
        1.0,
        "Sampling temperature; it also divides the logits of every log-prob that is trained on.",
    )
    top_p: float = _setting(1.0, "Sample from the smallest set of tokens with this mass. 1: from all.")
    top_k: int = _setting(0, "Sample from so many of the likeliest tokens. 0: from all.")
    min_p: float | None = _setting(
        None,
        "Drop tokens whose probability is below this share of the likeliest one's. None: off.",
    )
    generation_kwargs: dict[str, Any] | str | None = _setting(
        None,
        "More settings of GenerationConfig, or of SamplingParams with vLLM; JSON on the command line. They win over "
        "the fields here, for sampling and for the log-probs alike.",
    )
    chat_template_kwargs: dict[str, Any] | str | None = _setting(
        None,
        "Keywords of the chat template, for student and teacher; JSON on the command line, for example "
        '{"enable_thinking": false}.',
    )
    repetition_penalty: float = _setting(1.0, "Above 1: discourage tokens seen so far; below 1: encourage them.")
    cache_implementation: str | None = _setting(
        None,
        "Kind of key-value cache of model.generate. None: the model's own. No vLLM.",
    )

    # --- vLLM ------------------------------------------------------------------------------------------------------

    use_vllm: bool = _setting(False, "Generate with vLLM instead of model.generate.")
    use_teacher_server: bool = _setting(
        False,
        "Ask the vLLM server for the teacher's log-probs. Needs vllm_mode 'server', a live teacher, "
        "distillation_weight 1 and 'sampled_token' or 'topk_logits' (on the teacher's own top k).",
    )
    vllm_mode: Literal["colocate", "server"] = _setting(
        "colocate",
        "'colocate': an engine in the training processes. 'server': one that was started apart.",
    )
    vllm_model_impl: Literal["vllm", "transformers"] = _setting("vllm", "Whose model code the colocated engine runs.")
    vllm_enable_sleep_mode: bool = _setting(False, "The colocated engine frees its memory while the optimizer works.")
    vllm_server_base_url: str | None = _setting(
        None,
        "Address of the server, such as http://localhost:8000. It replaces host and port.",
    )
    vllm_server_host: str = _setting("0.0.0.0", "Host of the server.")
    vllm_server_port: int = _setting(8000, "Port of the server.")
    vllm_group_port: int = _setting(51216, "Port over which weights are sent to the server.")
    vllm_server_timeout: float = _setting(240.0, "Seconds within which the server has to be up and to answer.")
    vllm_tensor_parallel_size: int = _setting(1, "Devices one colocated engine is spread over.")
    vllm_gpu_memory_utilization: float = _setting(0.3, "Share of the device's memory the colocated engine may take.")
    vllm_max_model_length: int | None = _setting(
        None,
        "Context length of the colocated engine. None: the model's own.",
    )
    vllm_importance_sampling_correction: bool = _setting(
        True,
        "Correct both loss terms for the difference between vLLM's log-probs and the trainer's, by the importance "
        "weight exp(logp_trainer - logp_vllm).",
    )
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        _setting(
            "token_truncate",
            "One weight a token or one a completion; above the cap it is truncated to the cap, or the token or "
            "completion leaves the loss.",
        )
    )
    vllm_importance_sampling_cap: float = _setting(2.0, "Cap of that importance weight.")

    # --- training --------------------------------------------------------------------------------------------------

    num_iterations: int = _setting(1, "Times each block of rollouts is used.")
    loss_type: LossType = _setting(
        "dapo",
        "How token losses are averaged. 'grpo': over a completion, then over completions. 'bnpo': over the tokens of"
        " the local batch. 'dr_grpo': sum / (completions * max_completion_length). 'dapo': over the tokens of the "
        "whole optimizer step, all processes and accumulation steps.",
    )
    mask_truncated_completions: bool = _setting(
        False,
        "Leave a truncated completion out of the loss; it is still attended to.",
    )

    def __post_init__(self) -> None:
        for name in ("model_init_kwargs", "generation_kwargs", "chat_template_kwargs"):
            setattr(self, name, _parse_json(name, getattr(self, name)))
        self.scale_rewards = _normalize_scale_rewards(self.scale_rewards)
        _check_types(self)
        _check_ranges(self)
        for rule in _RULES:
            rule(self)
        self._resolve_device()
        self._resolve_bf16()
        self._resolve_checkpointing_name()
        super().__post_init__()
        self._resolve_block()

    @classmethod
    def preset(cls, name: PresetName, **overrides: Any) -> SDPOConfig:
        """Settings of the paper's runs (arXiv 2601.20802 v2). `overrides` win over them.

        "no_feedback" is section 3, "rich_feedback" section 4, "test_time" section 5. The paper counts questions: a
        block of `generation_batch_size` = questions * `num_generations` completions, an optimizer step of
        mini-batch * `num_generations`. `gradient_accumulation_steps` makes up that step from
        `per_device_train_batch_size` and the number of processes, and `teacher_sync_steps` moves the average once a
        block, as the authors' code does; both are left alone where you set them. A setting of the preset that an
        override makes void (the rate of a teacher that does not move, the k of a mode without one) is dropped.

        Raises:
            ValueError: no such preset, or an optimizer step that the completions in flight at once do not divide.
        """
        _check_choice("preset", name, get_args(PresetName))
        preset = _PRESETS[name]
        values = {**_PAPER, **preset.settings, **overrides}
        for void in _void_settings(values) - overrides.keys():
            values.pop(void, None)
        group = values["num_generations"]
        if not {"generation_batch_size", "steps_per_generation"} & overrides.keys():
            values["generation_batch_size"] = preset.questions * group
        config = cls(**values)

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

    # --- views -----------------------------------------------------------------------------------------------------

    @property
    def sampling(self) -> SamplingSettings:
        """How completions are drawn, with what `generation_kwargs` overrides already in place."""
        return SamplingSettings(
            max_completion_length=self._sampled_with("max_completion_length"),
            temperature=self._sampled_with("temperature"),
            top_p=self._sampled_with("top_p"),
            top_k=self._sampled_with("top_k"),
            min_p=self._sampled_with("min_p"),
            repetition_penalty=self._sampled_with("repetition_penalty"),
            cache_implementation=self._sampled_with("cache_implementation"),
            generation_kwargs=dict(_as_dict(self.generation_kwargs)),
        )

    @property
    def reprompt(self) -> RepromptSettings:
        """How the teacher's prompt is made."""
        return RepromptSettings(**{f.name: getattr(self, f.name) for f in fields(RepromptSettings)})

    @property
    def objective(self) -> ObjectiveSettings:
        """What is minimized. Temperature and length are those of `sampling`; `epsilon_high` is resolved."""
        return ObjectiveSettings(
            loss_type=self.loss_type,
            max_completion_length=self._sampled_with("max_completion_length"),
            temperature=self._sampled_with("temperature"),
            beta=self.beta,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
            importance_sampling_level=self.importance_sampling_level,
            weight=self.distillation_weight,
            alpha=self.distillation_alpha,
            mode=self.distillation_mode,
            topk=self.distillation_topk,
            is_clip=self.distillation_is_clip,
            add_tail=self.distillation_add_tail,
        )

    @property
    def teacher(self) -> TeacherSettings:
        """Which weights the teacher has and whether they move."""
        return TeacherSettings(
            kind=self.teacher_model_kind,
            update_rate=self.teacher_update_rate,
            sync_steps=self.teacher_sync_steps,
            dtype=None if self.teacher_dtype is None else getattr(torch, self.teacher_dtype),
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values. Works on a copy: the base class writes strings for dtypes into nested dicts."""
        plain = copy.copy(self)
        for name in ("model_init_kwargs", "generation_kwargs", "chat_template_kwargs"):
            setattr(plain, name, copy.deepcopy(getattr(self, name)))
        values: dict[str, Any] = super(SDPOConfig, plain).to_dict()
        return values

    # --- what is resolved at construction --------------------------------------------------------------------------

    def _sampled_with(self, name: str) -> Any:
        return _as_dict(self.generation_kwargs).get(_override_key(name, self.use_vllm), getattr(self, name))

    def _resolve_device(self) -> None:
        """Says so where there is only a CPU: without it, bf16 is refused and processes do not find each other."""
        self.use_cpu: bool = self.use_cpu or not torch.accelerator.is_available()

    def _resolve_bf16(self) -> None:
        if self.bf16 is None:
            can_bf16 = is_torch_bf16_gpu_available() or is_torch_xla_available()
            self.bf16 = can_bf16 and not self.fp16 and not self.use_cpu

    def _resolve_checkpointing_name(self) -> None:
        """Moves our default to the newer name, so that nobody is warned of a deprecated name they did not use."""
        if "activation_checkpointing" not in type(self).__dataclass_fields__:
            return
        if self.activation_checkpointing is None:
            self.activation_checkpointing: bool | None = self.gradient_checkpointing
        elif self.activation_checkpointing and not self.gradient_checkpointing:
            warnings.warn("activation_checkpointing=True wins over gradient_checkpointing=False.", stacklevel=5)

    def _resolve_block(self) -> None:
        """Sets both of `generation_batch_size` and `steps_per_generation`: whole microbatches and whole groups."""
        at_once = self.per_device_train_batch_size * self.world_size
        spelled = f"per_device_train_batch_size ({self.per_device_train_batch_size}) * {self.world_size} processes"
        unit = math.lcm(at_once, self.num_generations)
        if self.generation_batch_size is None:
            self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
            self.generation_batch_size = at_once * self.steps_per_generation
        if self.generation_batch_size % at_once:
            raise ValueError(
                f"generation_batch_size ({self.generation_batch_size}) is not divisible by the global batch "
                f"{spelled} = {at_once}. Set it to a multiple of {unit}, such as "
                f"{_nearest(self.generation_batch_size, unit)}, or change per_device_train_batch_size."
            )
        steps = self.generation_batch_size // at_once
        if self.steps_per_generation not in (None, steps):
            raise ValueError(
                f"generation_batch_size ({self.generation_batch_size}) and steps_per_generation "
                f"({self.steps_per_generation}) contradict each other: {spelled} * {self.steps_per_generation} = "
                f"{at_once * self.steps_per_generation}. Set one of them, and the other to None."
            )
        self.steps_per_generation = steps
        if self.generation_batch_size % self.num_generations:
            raise ValueError(
                f"generation_batch_size ({self.generation_batch_size} = {spelled} * steps_per_generation {steps}) is "
                f"not divisible by num_generations ({self.num_generations}): a block holds whole groups. Set "
                f"generation_batch_size to a multiple of {unit}, such as "
                f"{_nearest(self.generation_batch_size, unit)}, or num_generations to one of "
                f"{_divisors(self.generation_batch_size)}."
            )


# --- presets ------------------------------------------------------------------------------------------------------


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


# --- values, one at a time ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Interval:
    """Finite numbers from `low` to `high`; `is_open` leaves `low` itself out."""

    low: float = -math.inf
    high: float = math.inf
    is_open: bool = False

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high and not (self.is_open and value == self.low)

    def __str__(self) -> str:
        left = "(" if self.is_open or self.low == -math.inf else "["
        return f"{left}{self.low:g}, {self.high:g}{')' if self.high == math.inf else ']'}"


_FINITE = _Interval()
_UNIT = _Interval(0, 1)
_SHARE = _Interval(0, 1, is_open=True)
_POSITIVE = _Interval(0, is_open=True)
_NOT_NEGATIVE = _Interval(0)
_AT_LEAST_ONE = _Interval(1)
_PORT = _Interval(1, 65535)

# The range of every number; None, where the type allows it, needs no range.
_RANGES: Mapping[str, _Interval] = {
    "per_device_train_batch_size": _AT_LEAST_ONE,
    "per_device_eval_batch_size": _AT_LEAST_ONE,
    "gradient_accumulation_steps": _AT_LEAST_ONE,
    "learning_rate": _NOT_NEGATIVE,
    "beta": _NOT_NEGATIVE,
    "epsilon": _POSITIVE,
    "epsilon_high": _NOT_NEGATIVE,
    "distillation_weight": _UNIT,
    "distillation_alpha": _UNIT,
    "distillation_topk": _AT_LEAST_ONE,
    "distillation_is_clip": _POSITIVE,
    "teacher_update_rate": _UNIT,
    "teacher_sync_steps": _AT_LEAST_ONE,
    "success_reward_threshold": _FINITE,
    "max_reprompt_len": _AT_LEAST_ONE,
    "diagnostics_warning_interval": _NOT_NEGATIVE,
    "diagnostics_flat_tolerance": _NOT_NEGATIVE,
    "max_prompt_length": _AT_LEAST_ONE,
    "num_generations": _AT_LEAST_ONE,
    "num_generations_eval": _AT_LEAST_ONE,
    "max_completion_length": _AT_LEAST_ONE,
    "generation_batch_size": _AT_LEAST_ONE,
    "steps_per_generation": _AT_LEAST_ONE,
    "temperature": _POSITIVE,
    "top_p": _SHARE,
    "top_k": _NOT_NEGATIVE,
    "min_p": _UNIT,
    "repetition_penalty": _POSITIVE,
    "vllm_server_port": _PORT,
    "vllm_group_port": _PORT,
    "vllm_server_timeout": _POSITIVE,
    "vllm_tensor_parallel_size": _AT_LEAST_ONE,
    "vllm_gpu_memory_utilization": _SHARE,
    "vllm_max_model_length": _AT_LEAST_ONE,
    "vllm_importance_sampling_cap": _POSITIVE,
    "num_iterations": _AT_LEAST_ONE,
}


@functools.cache
def _own_types() -> dict[str, Any]:
    """Type of each field that this module declares."""
    own = {f.name for f in fields(SDPOConfig)} & SDPOConfig.__annotations__.keys()
    return {name: hint for name, hint in get_type_hints(SDPOConfig).items() if name in own}


def _accepts(hint: Any, value: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_accepts(option, value) for option in get_args(hint))
    if origin is Literal:
        return isinstance(value, str)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _type_name(hint: Any) -> str:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    names = ["None" if o is type(None) else (get_origin(o) or o).__name__ for o in options]
    return " or ".join(names)


def _check_types(config: SDPOConfig) -> None:
    for name, hint in _own_types().items():
        value = getattr(config, name)
        if get_origin(hint) is Literal:
            _check_choice(name, value, get_args(hint))
        elif not _accepts(hint, value):
            raise ValueError(f"`{name}` must be of type {_type_name(hint)}, got {value!r} ({type(value).__name__}).")
    _check_choice("scale_rewards", config.scale_rewards, get_args(ScaleRewards))


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {list(allowed)}, got {value!r}.{_did_you_mean(value, allowed)}")


def _check_ranges(config: SDPOConfig) -> None:
    for name, interval in _RANGES.items():
        value = getattr(config, name)
        if value is not None and value not in interval:
            raise ValueError(f"`{name}` must be in {interval}, got {value}.")


def _did_you_mean(value: Any, options: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(value), list(options), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _nearest(value: int, unit: int) -> str:
    """The multiples of `unit` on both sides of `value`, in words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _divisors(value: int) -> list[int]:
    return [d for d in range(1, value + 1) if value % d == 0]


def _parse_json(name: str, value: Any) -> Any:
    """The dict, from JSON where it was given as text; a copy, so that the caller's own stays apart."""
    if isinstance(value, dict):
        return dict(value)
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"`{name}` must be a dict or a JSON object, got {value!r}: {error}.") from error
    if parsed is not None and not isinstance(parsed, dict):
        raise ValueError(f"`{name}` must be a dict or a JSON object, got {value!r}.")
    return parsed


def _as_dict(value: dict[str, Any] | str | None) -> dict[str, Any]:
    """Dict fields after construction: never text any more."""
    return value if isinstance(value, dict) else {}


def _normalize_scale_rewards(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    return {True: "group", False: "none"}[value] if isinstance(value, bool) else value


# --- rules between settings ---------------------------------------------------------------------------------------


def _length_is_set(config: SDPOConfig) -> None:
    if config.max_completion_length is None:
        raise ValueError(
            "`max_completion_length` is None: generation has no limit then, and 'dr_grpo' divides by it. Set a number."
        )


def _reward_weights_are_finite(config: SDPOConfig) -> None:
    weights = config.reward_weights
    if weights is None:
        return
    if not weights or not all(_accepts(float, w) and math.isfinite(w) for w in weights):
        raise ValueError(f"`reward_weights` must hold one finite number for each reward function, got {weights}.")


def _mode_fits_divergence(config: SDPOConfig) -> None:
    mode, topk = config.distillation_mode, config.distillation_topk
    if mode == "sampled_token" and config.distillation_alpha != 1:
        raise ValueError(
            f"distillation_mode='sampled_token' estimates the reverse KL, which is distillation_alpha=1.0; got "
            f"{config.distillation_alpha}. Set it to 1.0, or distillation_mode to 'full_logits' or 'topk_logits'."
        )
    if mode == "topk_logits" and topk is None:
        raise ValueError(
            "distillation_mode='topk_logits' needs `distillation_topk`, got None. The paper uses 100 or 20."
        )
    if mode != "topk_logits" and topk is not None:
        raise ValueError(
            f"distillation_topk={topk} cannot take effect with distillation_mode={mode!r}. Set distillation_mode to "
            f"'topk_logits', or leave distillation_topk None."
        )
    if mode != "topk_logits" and config.distillation_add_tail:
        raise ValueError(
            f"distillation_add_tail=True cannot take effect with distillation_mode={mode!r}: only a top k has a tail. "
            f"Set distillation_mode to 'topk_logits', or distillation_add_tail to False."
        )


def _beta_has_a_policy_term(config: SDPOConfig) -> None:
    if config.beta > 0 and config.distillation_weight == 1:
        raise ValueError(
            f"beta={config.beta} cannot take effect with distillation_weight=1.0: the KL to the reference is part of "
            f"the policy term, weighted by 1 - distillation_weight. Lower distillation_weight, or set beta to 0."
        )


def _teacher_settings_act(config: SDPOConfig) -> None:
    if config.distillation_weight == 0:
        return
    kind = config.teacher_model_kind
    if kind == "live" and config.teacher_dtype is not None:
        raise ValueError(
            f"teacher_dtype={config.teacher_dtype!r} cannot take effect with teacher_model_kind='live': that teacher "
            "is the student itself. Leave teacher_dtype out, or choose 'ema', 'base' or 'trust_region'."
        )
    idle = {"base": ("teacher_update_rate", "teacher_sync_steps"), "trust_region": ("teacher_sync_steps",)}
    idle["live"] = idle["base"]
    for name in idle.get(kind, ()):
        value, default = getattr(config, name), _default(name)
        if value != default:
            raise ValueError(
                f"{name}={value} cannot take effect with teacher_model_kind={kind!r}, whose weights are not averaged. "
                f"Set teacher_model_kind to 'ema', or leave {name} at {default}."
            )


def _groups_are_large_enough(config: SDPOConfig) -> None:
    if config.num_generations > 1:
        return
    if config.distillation_weight < 1:
        raise ValueError(
            f"num_generations=1 with distillation_weight={config.distillation_weight}: the policy term compares a "
            f"completion with its group, and a group of one has no baseline. Set num_generations to 2 or more, or "
            f"distillation_weight to 1."
        )
    has_other = config.use_successful_as_teacher and not config.dont_reprompt_on_self_success
    if not has_other and not config.include_environment_feedback:
        raise ValueError(
            "num_generations=1 leaves the teacher nothing to be shown: there is no other completion to demonstrate, "
            "and include_environment_feedback is False. Set num_generations to 2 or more, "
            "include_environment_feedback to True, or dont_reprompt_on_self_success to False."
        )


def _teacher_is_shown_something(config: SDPOConfig) -> None:
    if config.distillation_weight and not (config.use_successful_as_teacher or config.include_environment_feedback):
        warnings.warn(
            "use_successful_as_teacher and include_environment_feedback are both False: the teacher's prompt holds no "
            "more than the student's, and no row is distilled.",
            stacklevel=5,
        )


def _feedback_options_act(config: SDPOConfig) -> None:
    if config.environment_feedback_only_without_solution and not config.include_environment_feedback:
        raise ValueError(
            "environment_feedback_only_without_solution=True cannot take effect with include_environment_feedback="
            "False. Set include_environment_feedback to True, or the former to False."
        )


def _sequence_ratio_has_its_mean(config: SDPOConfig) -> None:
    if config.importance_sampling_level == "sequence" and config.loss_type != "grpo":
        warnings.warn(
            f"importance_sampling_level='sequence' gives a completion one ratio, but loss_type={config.loss_type!r} "
            f"weighs completions by their length. GSPO is loss_type='grpo'.",
            stacklevel=5,
        )


def _vllm_options_act(config: SDPOConfig) -> None:
    if config.use_vllm and not config.ds3_gather_for_generation:
        raise ValueError(
            "ds3_gather_for_generation=False does not go with use_vllm=True: the weights are gathered to be sent to "
            "vLLM. Set ds3_gather_for_generation to True, or use_vllm to False."
        )
    if config.use_vllm and config.cache_implementation is not None:
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} cannot take effect with use_vllm=True, which has "
            f"its own cache. Leave it None, or set use_vllm to False."
        )
    requests = {
        "vllm_enable_sleep_mode": "colocate",
        "vllm_mode": None,
        "vllm_server_base_url": "server",
        "vllm_server_host": "server",
    }
    for name, mode in requests.items():
        value = getattr(config, name)
        if value == _default(name):
            continue
        if not config.use_vllm:
            raise ValueError(
                f"{name}={value!r} cannot take effect with use_vllm=False. Set use_vllm to True, or leave {name} at "
                f"{_default(name)!r}."
            )
        if mode not in (None, config.vllm_mode):
            raise ValueError(
                f"{name}={value!r} cannot take effect with vllm_mode={config.vllm_mode!r}. Set vllm_mode to {mode!r}, "
                f"or leave {name} at {_default(name)!r}."
            )


def _teacher_server_can_serve(config: SDPOConfig) -> None:
    if not config.use_teacher_server:
        return
    needs = (
        ("use_vllm", (True,), "the server that generates is the one that is asked"),
        ("vllm_mode", ("server",), "a colocated engine does not serve the teacher's log-probs"),
        ("teacher_model_kind", ("live",), "the server holds the current weights and no others"),
        ("distillation_weight", (1.0,), "the policy term is not computed on this path"),
        (
            "distillation_mode",
            ("sampled_token", "topk_logits"),
            "the server returns the teacher's likeliest tokens, not the vocabulary",
        ),
    )
    for name, allowed, reason in needs:
        value = getattr(config, name)
        if value not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise ValueError(f"use_teacher_server=True needs {name}={wanted}, got {value!r}: {reason}.")


# --- templates ----------------------------------------------------------------------------------------------------

# Template -> the names it may hold, the required one first.
_PLACEHOLDERS: Mapping[str, tuple[str, ...]] = {
    "reprompt_template": ("prompt", "solution", "feedback"),
    "solution_template": ("successful_previous_attempt",),
    "feedback_template": ("feedback_raw",),
}


def _templates_parse(config: SDPOConfig) -> None:
    for name, allowed in _PLACEHOLDERS.items():
        if allowed[0] not in _placeholders(name, getattr(config, name), allowed):
            raise ValueError(f"`{name}` must contain {{{allowed[0]}}}, got {getattr(config, name)!r}.")


def _placeholders(name: str, template: str, allowed: tuple[str, ...]) -> set[str]:
    """Names of the placeholders in `template`; ValueError where a brace is anything but one of `allowed`."""
    names = ", ".join(f"{{{a}}}" for a in allowed)
    help_text = f"Allowed are {names}; write a literal brace twice, as in \\boxed{{{{}}}}."
    found: set[str] = set()
    try:
        for literal, key, spec, conversion in string.Formatter().parse(template):
            if key is None:
                continue
            if key not in allowed or spec or conversion:
                tail = literal[-12:].split()[-1:] if not literal[-1:].isspace() else []
                piece = (
                    "".join(tail) + "{" + key + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                )
                raise ValueError(
                    f"`{name}` holds {piece + '}'!r}, which is no placeholder.{_did_you_mean(key, allowed)}"
                )
            found.add(key)
    except ValueError as error:
        reason = (
            str(error) if f"`{name}`" in str(error) else f"`{name}` holds an unmatched brace ({error}): {template!r}."
        )
        raise ValueError(f"{reason} {help_text}") from None
    return found


def _template_shows_the_context(config: SDPOConfig) -> None:
    if config.distillation_weight == 0:
        return
    found = _placeholders("reprompt_template", config.reprompt_template, _PLACEHOLDERS["reprompt_template"])
    needs = {"solution": "use_successful_as_teacher", "feedback": "include_environment_feedback"}
    for placeholder, switch in needs.items():
        if getattr(config, switch) and placeholder not in found:
            raise ValueError(
                f"{switch}=True cannot take effect: `reprompt_template` has no {{{placeholder}}}, got "
                f"{config.reprompt_template!r}. Add it, or set {switch} to False."
            )


# --- generation and chat template keywords ------------------------------------------------------------------------

_OVERRIDABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
_NO_SAMPLE = "training needs plain samples of the policy"
_UNREAD = "only the sampled token ids are read"

# Key of generation_kwargs -> the values that change nothing, and why any other is refused.
_REFUSED_BY_GENERATE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), _NO_SAMPLE),
    "num_beam_groups": ((None, 1), _NO_SAMPLE),
    "penalty_alpha": ((None,), _NO_SAMPLE),
    "dola_layers": ((None,), _NO_SAMPLE),
    "constraints": ((None,), _NO_SAMPLE),
    "force_words_ids": ((None,), _NO_SAMPLE),
    "num_return_sequences": ((None, 1), "`num_generations` says how many completions a prompt gets"),
    "max_length": ((None,), "it counts the prompt too; set `max_completion_length`"),
    "return_dict_in_generate": ((None, False), _UNREAD),
    "output_scores": ((None, False), _UNREAD),
    "output_logits": ((None, False), _UNREAD),
    "output_attentions": ((None, False), _UNREAD),
    "output_hidden_states": ((None, False), _UNREAD),
}
_REFUSED_BY_VLLM: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((None, 1), "`num_generations` says how many completions a prompt gets"),
    "max_new_tokens": ((), "vLLM calls it max_tokens; or set `max_completion_length`"),
    "do_sample": ((), "vLLM has no such setting; it samples wherever `temperature` is above 0"),
    "num_beams": ((), "vLLM has no such setting"),
}
_SET_BY_THE_LIBRARY = frozenset(
    {"tokenize", "add_generation_prompt", "return_dict", "return_tensors", "padding", "truncation", "max_length"}
)


def _override_key(name: str, use_vllm: bool) -> str:
    """What `generation_kwargs` calls the field `name`."""
    if name == "max_completion_length":
        return "max_tokens" if use_vllm else "max_new_tokens"
    return name


def _generation_kwargs_are_known(config: SDPOConfig) -> None:
    kwargs = _as_dict(config.generation_kwargs)
    known = [key for key in GenerationConfig().to_dict() if not key.startswith("_") and key != "transformers_version"]
    for key in kwargs:
        # SamplingParams is not looked at: that would import vLLM. It refuses unknown names itself.
        if not config.use_vllm and key not in known:
            close = difflib.get_close_matches(key, known, n=3)
            hint = f" Close names: {', '.join(close)}." if close else ""
            raise ValueError(f"`generation_kwargs` has {key!r}, which GenerationConfig does not know.{hint}")
    for key, (neutral, reason) in (_REFUSED_BY_VLLM if config.use_vllm else _REFUSED_BY_GENERATE).items():
        if key in kwargs and kwargs[key] not in neutral:
            raise ValueError(f"`generation_kwargs` has {key}={kwargs[key]!r}: {reason}. Remove it.")


def _generation_overrides_are_in_range(config: SDPOConfig) -> None:
    kwargs = _as_dict(config.generation_kwargs)
    for name in _OVERRIDABLE:
        key = _override_key(name, config.use_vllm)
        if key not in kwargs or (name == "min_p" and kwargs[key] is None):
            continue
        value, interval = kwargs[key], _RANGES[name]
        hint = int if name in ("top_k", "max_completion_length") else float
        if not _accepts(hint, value) or value not in interval:
            kind = "an integer" if hint is int else "a number"
            raise ValueError(f"`generation_kwargs` has {key}={value!r}, which must be {kind} in {interval}.")


def _samples_differ(config: SDPOConfig) -> None:
    do_sample = _as_dict(config.generation_kwargs).get("do_sample", True)
    if do_sample is not True and config.num_generations > 1:
        raise ValueError(
            f"`generation_kwargs` has do_sample={do_sample}: the {config.num_generations} completions of a prompt "
            f"would be the same. Remove it, or set num_generations to 1."
        )


def _cache_is_known(config: SDPOConfig) -> None:
    cache = config._sampled_with("cache_implementation")
    if not config.use_vllm and cache is not None:
        _check_choice("cache_implementation", cache, tuple(ALL_CACHE_IMPLEMENTATIONS))


def _chat_template_kwargs_are_free(config: SDPOConfig) -> None:
    taken = sorted(_SET_BY_THE_LIBRARY & _as_dict(config.chat_template_kwargs).keys())
    if taken:
        raise ValueError(f"`chat_template_kwargs` has {', '.join(taken)}, which the library sets itself. Remove it.")


def _default(name: str) -> Any:
    return SDPOConfig.__dataclass_fields__[name].default


# In the order in which they are looked at: the first that fails speaks.
_RULES: tuple[Callable[[SDPOConfig], None], ...] = (
    _length_is_set,
    _reward_weights_are_finite,
    _templates_parse,
    _mode_fits_divergence,
    _teacher_server_can_serve,
    _beta_has_a_policy_term,
    _groups_are_large_enough,
    _teacher_settings_act,
    _feedback_options_act,
    _template_shows_the_context,
    _teacher_is_shown_something,
    _sequence_ratio_has_its_mean,
    _vllm_options_act,
    _generation_kwargs_are_known,
    _generation_overrides_are_in_range,
    _samples_differ,
    _cache_is_known,
    _chat_template_kwargs_are_free,
)
