"""The settings of a run: flat fields, every check at construction, and frozen views of them for the layers below.

What is accepted is decided in `config_rules` and `sampling_rules`: an option that cannot take effect raises. Values
that only tune a part are let through where that part is switched off, so that a script can switch it off for a
comparison and keep the rest of its command line: the distillation or the policy term at weight 0, demonstrations,
feedback, vLLM. What asks for such a part, as `beta` does, raises.
"""
# ruff: noqa: RUF009, RUF036  (`_setting` is short for dataclasses.field; HfArgumentParser reads `None | str | list`)

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from sdpo.config_rules import (
    RULES,
    as_dict,
    check_ranges,
    check_types,
    divisors,
    explain_unknown_names,
    multiples_around,
    normalize_scale_rewards,
    parse_json,
)
from sdpo.presets import PresetName, build_preset
from sdpo.sampling_rules import SAMPLING_RULES, override_key, reshaping_options
from sdpo.types import (
    DemonstrationSelection,
    DistillationMode,
    EngineSettings,
    ImportanceSamplingLevel,
    LossType,
    ObjectiveSettings,
    RepromptSettings,
    SamplerCorrection,
    SamplingSettings,
    TeacherKind,
    TeacherSettings,
)

TeacherDtype = Literal["float32", "bfloat16", "float16"]

# Heading of the documentation -> the first field under it. A field belongs to the last heading begun before it.
SECTIONS: Mapping[str, str] = {
    "Changed defaults of TrainingArguments": "learning_rate",
    "Policy objective": "beta",
    "Distillation": "distillation_weight",
    "Teacher": "teacher_model_kind",
    "Reprompting": "use_successful_as_teacher",
    "Diagnostics": "diagnostics_warning_interval",
    "Log of completions": "log_completions",
    "Model and data": "model_init_kwargs",
    "Generation": "num_generations",
    "vLLM": "use_vllm",
    "Training": "num_iterations",
}
DICT_FIELDS = ("model_init_kwargs", "generation_kwargs", "chat_template_kwargs", "vllm_engine_kwargs")


class Derived(int):
    """A number that followed from other settings; it reads as an int.

    `dataclasses.replace` hands it to the new config, where it is told from a number that the user set, and follows
    anew. `int(...)` of it is a setting.
    """


def _setting(default: Any, help_text: str) -> Any:
    """A dataclass field with its help, the one source of the command line's help and of the documentation."""
    return field(default=default, metadata={"help": help_text})


@explain_unknown_names
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
        *DICT_FIELDS,
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
    demonstration_selection: DemonstrationSelection = _setting(
        "first",
        "Which of several successes is shown: the 'first' of the group, a 'random' one, the 'shortest' in tokens, or "
        "the 'best', that of the highest reward.",
    )
    demonstration_buffer_size: int = _setting(
        0,
        "Latest successes of each prompt that are kept over the run, to be shown where no sibling succeeded. 0: none.",
    )
    demonstration_column: str | None = _setting(
        None,
        "Dataset column with a solution of the prompt, shown where there is no success to show.",
    )
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
        "Repeat the warning about a degenerate run every so many such steps in a row. 0: never, and no warnings about "
        "its health.",
    )
    diagnostics_flat_tolerance: float = _setting(
        1e-8,
        "At or below it the spread of rewards, or the share of reprompted rows, counts as zero.",
    )

    # --- log of completions ----------------------------------------------------------------------------------------

    log_completions: bool = _setting(
        False,
        "Write every completion to output_dir/completions, with rewards, teacher prompt and what student and teacher "
        "said of each token; print a table of them each step, and hand it to the trackers of `report_to`. "
        "`python -m sdpo.report output_dir` makes a page of it. Costs both output heads once more on the distilled "
        "tokens.",
    )
    num_completions_to_print: int | None = _setting(
        None,
        "Rows of that table, spread evenly over the step's. None: all; 0: no table. The files hold all of them.",
    )
    log_unique_prompts: bool = _setting(
        False,
        "One completion a prompt in that table, and in what the trackers get.",
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
        "FSDP2 and DeepSpeed ZeRO-3: gather the whole weights to generate. False: much slower, for models that do "
        "not fit on one device; not with vLLM.",
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
        "distillation_weight 1 and 'sampled_token' or 'topk_logits' (see teacher_server_support).",
    )
    teacher_server_support: Literal["teacher", "student"] = _setting(
        "teacher",
        "Whose top k a served teacher is compared on, in 'topk_logits'. 'teacher': its own, from one request for many "
        "sequences. 'student': the student's, as with a local teacher, for one request a token and a k up to 128.",
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
    vllm_engine_kwargs: dict[str, Any] | str | None = _setting(
        None,
        "Further arguments of the colocated engine (vllm.LLM), such as {'enforce_eager': true}.",
    )
    vllm_lora_as_adapter: bool = _setting(
        False,
        "Send a LoRA adapter to the colocated engine as it is, and the model under it once. False: merged into the "
        "weights, which are all sent each time.",
    )
    vllm_check_weights: bool = _setting(
        False,
        "After weights were sent, compare a short sequence's log-probs on both sides; stop where they differ.",
    )
    vllm_importance_sampling_correction: bool = _setting(
        True,
        "Correct both loss terms for the difference between vLLM's log-probs and the trainer's, by the importance "
        "weight exp(logp_trainer - logp_vllm), without gradient. Off, with a warning, where settings such as `top_p` "
        "make vLLM draw from another distribution than the one that is trained.",
    )
    vllm_importance_sampling_mode: SamplerCorrection = _setting(
        "token_truncate",
        "One weight a token, or one a completion: the product of its tokens' weights. Above the cap it is truncated "
        "to the cap, or masked: then the token or completion adds 0 to the loss.",
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
        for name in DICT_FIELDS:
            setattr(self, name, parse_json(name, getattr(self, name)))
        self.scale_rewards = normalize_scale_rewards(self.scale_rewards)
        check_types(self, declared_in=SDPOConfig)
        check_ranges(self)
        for rule in (*RULES, *SAMPLING_RULES):
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
        config: SDPOConfig = build_preset(cls, name, overrides)
        return config

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
            generation_kwargs=dict(as_dict(self.generation_kwargs)),
        )

    @property
    def engine(self) -> EngineSettings:
        """Where the vLLM engine is and how it is started."""
        return EngineSettings(
            mode=self.vllm_mode,
            model_impl=self.vllm_model_impl,
            enable_sleep_mode=self.vllm_enable_sleep_mode,
            server_url=self.vllm_server_base_url or f"http://{self.vllm_server_host}:{self.vllm_server_port}",
            server_timeout=self.vllm_server_timeout,
            group_port=self.vllm_group_port,
            tensor_parallel_size=self.vllm_tensor_parallel_size,
            gpu_memory_utilization=self.vllm_gpu_memory_utilization,
            max_model_length=self.vllm_max_model_length,
            trust_remote_code=self.trust_remote_code,
            engine_kwargs=as_dict(self.vllm_engine_kwargs),
            lora_as_adapter=self.vllm_lora_as_adapter,
            check_weights=self.vllm_check_weights,
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
            sampler_correction=self._sampler_correction,
            sampler_cap=self.vllm_importance_sampling_cap,
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
        for name in DICT_FIELDS:
            setattr(plain, name, copy.deepcopy(getattr(self, name)))
        for name in ("generation_batch_size", "steps_per_generation"):
            setattr(plain, name, int(getattr(self, name)))
        values: dict[str, Any] = super(SDPOConfig, plain).to_dict()
        return values

    def __getstate__(self) -> dict[str, Any]:
        """All but the token: `Trainer` pickles the config into `training_args.bin`, which is pushed with the model."""
        return {**self.__dict__, "hub_token": None}

    # --- what is resolved at construction --------------------------------------------------------------------------

    def _sampled_with(self, name: str) -> Any:
        return as_dict(self.generation_kwargs).get(override_key(name, self.use_vllm), getattr(self, name))

    @property
    def _sampler_correction(self) -> SamplerCorrection | None:
        is_on = self.use_vllm and self.vllm_importance_sampling_correction and not reshaping_options(self)
        return self.vllm_importance_sampling_mode if is_on else None

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
        """Sets both of `generation_batch_size` and `steps_per_generation`, and marks what the user did not set."""
        names = ("generation_batch_size", "steps_per_generation")
        if None not in (self.generation_batch_size, self.steps_per_generation):
            # Derived ones are what `dataclasses.replace` found in the old config; nobody set them.
            for name in names:
                setattr(self, name, None if isinstance(getattr(self, name), Derived) else getattr(self, name))
        given = {name for name in names if getattr(self, name) is not None}
        self._cut_block()
        for name in names:
            setattr(self, name, (int if name in given else Derived)(getattr(self, name)))

    def _cut_block(self) -> None:
        """Makes each of the two from the other where it is None: whole microbatches and whole groups."""
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
                f"{multiples_around(self.generation_batch_size, unit)}, or change per_device_train_batch_size."
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
                f"{multiples_around(self.generation_batch_size, unit)}, or num_generations to one of "
                f"{divisors(self.generation_batch_size)}."
            )
