"""What SDPOConfig accepts: types, choices, ranges, and the rules between settings.

A rule takes the config and raises, or warns. Its message says what conflicts, the value given, and what to set.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from sdpo.templates import PLACEHOLDERS, did_you_mean, parse_template
from sdpo.types import ScaleRewards

Config = Any  # an SDPOConfig, whose module is above this one

# What other implementations call it -> what to use here.
NAMES_ELSEWHERE: Mapping[str, str] = {
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

_Class = TypeVar("_Class", bound=type)


def explain_unknown_names(cls: _Class) -> _Class:
    """Class decorator: an unknown keyword of `__init__` gets a TypeError that says what to use instead."""
    generated = cls.__init__  # type: ignore[misc]
    known = [f.name for f in fields(cls) if f.init]

    def explain(name: str) -> str:
        close = difflib.get_close_matches(name, known, n=1)
        meant = NAMES_ELSEWHERE.get(name) or (f"`{close[0]}`" if close else None)
        return f"{cls.__name__} has no field `{name}`" + (f": did you mean {meant}?" if meant else ".")

    @functools.wraps(generated)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise TypeError("\n".join(map(explain, unknown)))
        generated(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


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
RANGES: Mapping[str, _Interval] = {
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
    "demonstration_buffer_size": _NOT_NEGATIVE,
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
def _declared_types(config_class: type) -> dict[str, Any]:
    """Type of each field that the class itself declares."""
    own = {f.name for f in fields(config_class)} & config_class.__annotations__.keys()
    return {name: hint for name, hint in get_type_hints(config_class).items() if name in own}


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


def check_types(config: Config, *, declared_in: type) -> None:
    """Checks the fields that `declared_in`, the class of the config or one above it, declares."""
    for name, hint in _declared_types(declared_in).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal:
            check_choice(name, value, get_args(hint))
        elif not _accepts(hint, value):
            raise ValueError(f"`{name}` must be of type {_type_name(hint)}, got {value!r} ({type(value).__name__}).")
    check_choice("scale_rewards", config.scale_rewards, get_args(ScaleRewards))


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {list(allowed)}, got {value!r}.{did_you_mean(value, allowed)}")


def check_ranges(config: Config) -> None:
    for name, interval in RANGES.items():
        value = getattr(config, name)
        if value is not None and value not in interval:
            raise ValueError(f"`{name}` must be in {interval}, got {value}.")


def multiples_around(value: int, unit: int) -> str:
    """The multiples of `unit` on both sides of `value`, in words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def divisors(value: int) -> list[int]:
    return [d for d in range(1, value + 1) if value % d == 0]


def parse_json(name: str, value: Any) -> Any:
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


def as_dict(value: dict[str, Any] | str | None) -> dict[str, Any]:
    """A dict field after construction, where it is never text any more; empty for None."""
    return value if isinstance(value, dict) else {}


def normalize_scale_rewards(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    return {True: "group", False: "none"}[value] if isinstance(value, bool) else value


# --- rules between settings ---------------------------------------------------------------------------------------


def _length_is_set(config: Config) -> None:
    if config.max_completion_length is None:
        raise ValueError(
            "`max_completion_length` is None: generation has no limit then, and 'dr_grpo' divides by it. Set a number."
        )


def _reward_weights_are_finite(config: Config) -> None:
    weights = config.reward_weights
    if weights is None:
        return
    if not weights or not all(_accepts(float, w) and math.isfinite(w) for w in weights):
        raise ValueError(f"`reward_weights` must hold one finite number for each reward function, got {weights}.")


def _mode_fits_divergence(config: Config) -> None:
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


def _beta_has_a_policy_term(config: Config) -> None:
    if config.beta > 0 and config.distillation_weight == 1:
        raise ValueError(
            f"beta={config.beta} cannot take effect with distillation_weight=1.0: the KL to the reference is part of "
            f"the policy term, weighted by 1 - distillation_weight. Lower distillation_weight, or set beta to 0."
        )


def _teacher_settings_act(config: Config) -> None:
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
        value, default = getattr(config, name), _default(config, name)
        if value != default:
            raise ValueError(
                f"{name}={value} cannot take effect with teacher_model_kind={kind!r}, whose weights are not averaged. "
                f"Set teacher_model_kind to 'ema', or leave {name} at {default}."
            )


def _groups_are_large_enough(config: Config) -> None:
    if config.num_generations > 1:
        return
    if config.distillation_weight < 1:
        raise ValueError(
            f"num_generations=1 with distillation_weight={config.distillation_weight}: the policy term compares a "
            f"completion with its group, and a group of one has no baseline. Set num_generations to 2 or more, or "
            f"distillation_weight to 1."
        )


def _demonstration_options_act(config: Config) -> None:
    """Those that choose among successes need successes to be shown."""
    if config.distillation_weight == 0 or config.use_successful_as_teacher:
        return
    for name in ("demonstration_selection", "demonstration_buffer_size"):
        value, default = getattr(config, name), _default(config, name)
        if value != default:
            raise ValueError(
                f"{name}={value!r} cannot take effect with use_successful_as_teacher=False: no success is shown. Set "
                f"that to True, or leave {name} at {default!r}."
            )


def _feedback_options_act(config: Config) -> None:
    if config.environment_feedback_only_without_solution and not config.include_environment_feedback:
        raise ValueError(
            "environment_feedback_only_without_solution=True cannot take effect with include_environment_feedback="
            "False. Set include_environment_feedback to True, or the former to False."
        )


def _sequence_ratio_has_its_mean(config: Config) -> None:
    if config.importance_sampling_level == "sequence" and config.loss_type != "grpo":
        warnings.warn(
            f"importance_sampling_level='sequence' gives a completion one ratio, but loss_type={config.loss_type!r} "
            f"weighs completions by their length. GSPO is loss_type='grpo'.",
            stacklevel=5,
        )


def _vllm_options_act(config: Config) -> None:
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
    useless_without_vllm = {
        "vllm_enable_sleep_mode": "colocate",
        "vllm_mode": None,
        "vllm_server_base_url": "server",
        "vllm_server_host": "server",
        "vllm_engine_kwargs": "colocate",
        "vllm_check_weights": None,
    }
    for name in useless_without_vllm:
        value = getattr(config, name)
        if value == _default(config, name):
            continue
        if not config.use_vllm:
            raise ValueError(
                f"{name}={value!r} cannot take effect with use_vllm=False. Set use_vllm to True, or leave {name} at "
                f"{_default(config, name)!r}."
            )
    useless_in_the_other_mode = {
        **useless_without_vllm,
        "vllm_model_impl": "colocate",
        "vllm_tensor_parallel_size": "colocate",
        "vllm_gpu_memory_utilization": "colocate",
        "vllm_max_model_length": "colocate",
        "vllm_server_port": "server",
        "vllm_group_port": "server",
        "vllm_server_timeout": "server",
    }
    for name, mode in useless_in_the_other_mode.items():
        value = getattr(config, name)
        if config.use_vllm and mode not in (None, config.vllm_mode) and value != _default(config, name):
            raise ValueError(
                f"{name}={value!r} cannot take effect with vllm_mode={config.vllm_mode!r}. Set vllm_mode to {mode!r}, "
                f"or leave {name} at {_default(config, name)!r}."
            )


# Argument of vllm.LLM -> what decides it.
_ENGINE_ARGUMENTS = {
    "model": "the policy",
    "tokenizer": "`processing_class`",
    "load_format": "the weights, which come from the policy in memory",
    "logprobs_mode": "the sampler's correction, which needs processed_logprobs",
    "distributed_executor_backend": "the number of processes",
    "tensor_parallel_size": "`vllm_tensor_parallel_size`",
    "gpu_memory_utilization": "`vllm_gpu_memory_utilization`",
    "max_model_len": "`vllm_max_model_length`",
    "enable_sleep_mode": "`vllm_enable_sleep_mode`",
    "model_impl": "`vllm_model_impl`",
    "trust_remote_code": "`trust_remote_code`",
}


def _engine_arguments_are_free(config: Config) -> None:
    for name, value in as_dict(config.vllm_engine_kwargs).items():
        if name in _ENGINE_ARGUMENTS:
            raise ValueError(
                f"`vllm_engine_kwargs` has {name}={value!r}, which is decided by {_ENGINE_ARGUMENTS[name]}."
            )


def _teacher_server_can_serve(config: Config) -> None:
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
    temperature = config._sampled_with("temperature")
    if temperature != 1.0:
        raise ValueError(
            f"use_teacher_server=True needs temperature=1.0, got {temperature!r}: vLLM's log-probs of a prompt ignore "
            "the temperature, so the teacher would be another than the student's. Set temperature to 1.0, or "
            "use_teacher_server to False."
        )


# Field of TrainingArguments -> the values that change nothing here, and why any other would do nothing.
_NO_PREDICTIONS = (
    "evaluation samples and scores completions; no predictions are kept and no `compute_metrics` is called"
)
_OWN_ORDER = "`shuffle_dataset` decides the order of the prompts, in blocks of whole groups"
_WITHOUT_EFFECT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "label_smoothing_factor": ((0,), "the losses have no labels to smooth"),
    "label_names": ((None,), "the losses have no labels"),
    "train_sampling_strategy": (("random",), _OWN_ORDER),
    "length_column_name": (("length",), _OWN_ORDER),
    "dataloader_persistent_workers": ((None, False), "workers read prompts, and are started anew for each pass"),
    "dataloader_prefetch_factor": ((None,), "workers read prompts, a block at a time"),
    "include_for_metrics": ((None, []), _NO_PREDICTIONS),
    "batch_eval_metrics": ((None, False), _NO_PREDICTIONS),
    "eval_do_concat_batches": ((None, True), _NO_PREDICTIONS),
    "eval_use_gather_object": ((None, False), _NO_PREDICTIONS),
    "eval_accumulation_steps": ((None,), _NO_PREDICTIONS),
}


def _inherited_options_act(config: Config) -> None:
    for name, (neutral, reason) in _WITHOUT_EFFECT.items():
        # Newer and older versions of transformers have more fields and fewer.
        if name in type(config).__dataclass_fields__ and getattr(config, name) not in neutral:
            raise ValueError(f"{name}={getattr(config, name)!r} cannot take effect: {reason}. Leave it out.")


# --- templates ----------------------------------------------------------------------------------------------------


def _templates_parse(config: Config) -> None:
    for name in PLACEHOLDERS:
        parse_template(name, getattr(config, name))


def _template_shows_the_context(config: Config) -> None:
    if config.distillation_weight == 0:
        return
    found = [key for _, key in parse_template("reprompt_template", config.reprompt_template)]
    needs = (
        ("use_successful_as_teacher", "solution"),
        ("demonstration_column", "solution"),
        ("include_environment_feedback", "feedback"),
    )
    for switch, placeholder in needs:
        value = getattr(config, switch)
        if value and placeholder not in found:
            off = f"set {switch} to False" if value is True else f"leave {switch} out"
            raise ValueError(
                f"{switch}={value!r} cannot take effect: `reprompt_template` has no {{{placeholder}}}, got "
                f"{config.reprompt_template!r}. Add it, or {off}."
            )


# --- generation and chat template keywords ------------------------------------------------------------------------

_OVERRIDABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
_NO_SAMPLE = "training needs plain samples of the policy"
_ON_BEAMS = "it acts on beams, and training needs plain samples of the policy"
_DRAFTED = "it drafts the tokens of one prompt at a time, and a block has many"
_UNREAD = "only the sampled token ids are read"

# Key of generation_kwargs -> the values that change nothing, and why any other is refused.
_REFUSED_BY_GENERATE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), _NO_SAMPLE),
    "num_beam_groups": ((None, 1), _NO_SAMPLE),
    "penalty_alpha": ((None,), _NO_SAMPLE),
    "dola_layers": ((None,), _NO_SAMPLE),
    "constraints": ((None,), _NO_SAMPLE),
    "force_words_ids": ((None,), _NO_SAMPLE),
    "early_stopping": ((None, False), _ON_BEAMS),
    "length_penalty": ((None, 1), _ON_BEAMS),
    "diversity_penalty": ((None, 0), _ON_BEAMS),
    "low_memory": ((None, False), _ON_BEAMS),
    "prompt_lookup_num_tokens": ((None,), _DRAFTED),
    "assistant_early_exit": ((None,), _DRAFTED),
    "use_mtp": ((None, False), _DRAFTED),
    "is_assistant": ((None, False), _DRAFTED),
    "token_healing": (
        (None, False),
        "it rewrites the end of the prompt, and what is trained on is the prompt as it is",
    ),
    "stop_strings": (
        (None,),
        "a completion ends with an end-of-sequence token or is truncated; one that ends with a text would count as "
        "truncated. If that text is one token, add its id to model.generation_config.eos_token_id",
    ),
    "eos_token_id": (
        (),
        "decoding and masks go by it as well, so it is read from the model: set model.generation_config.eos_token_id",
    ),
    "pad_token_id": ((), "padding goes by the tokenizer: set its pad_token"),
    "bos_token_id": ((), "the beginning of a prompt goes by the tokenizer: set its bos_token"),
    "decoder_start_token_id": ((None,), "only an encoder-decoder model has a first token of its own"),
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
    "stop_token_ids": ((), "the tokens that end a completion go by the tokenizer and model.generation_config"),
    "ignore_eos": ((None, False), "a completion ends with an end-of-sequence token or is truncated"),
    "logprobs": ((0,), "those of the sampled tokens are asked for, and no others are read"),
    "prompt_logprobs": ((None,), _UNREAD),
}
_SET_BY_THE_LIBRARY = frozenset(
    {"tokenize", "add_generation_prompt", "return_dict", "return_tensors", "padding", "truncation", "max_length"}
)


def override_key(name: str, use_vllm: bool) -> str:
    """What `generation_kwargs` calls the field `name`."""
    if name == "max_completion_length":
        return "max_tokens" if use_vllm else "max_new_tokens"
    return name


# What makes vLLM draw from something else than softmax(logits / temperature) -> the value that does not; where none is
# given, that is None, 0 or empty. The first four are fields, the others keys of `generation_kwargs` alone.
_RESHAPING: Mapping[str, float | None] = {
    "top_p": 1,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": 1,
    "presence_penalty": None,
    "frequency_penalty": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "min_tokens": None,
    "logits_processors": None,
    "structured_outputs": None,
    "guided_decoding": None,
}


def reshaping_options(config: Config) -> dict[str, Any]:
    """The settings, by name, for which vLLM's log-probs are not of the distribution that is trained."""
    kwargs = as_dict(config.generation_kwargs)
    found = {name: kwargs.get(name, getattr(config, name, None)) for name in _RESHAPING}
    return {name: value for name, value in found.items() if value and value != _RESHAPING[name]}


def _sampler_correction_compares_like_with_like(config: Config) -> None:
    found = reshaping_options(config)
    if config.use_vllm and config.vllm_importance_sampling_correction and found:
        spelled = ", ".join(f"{name}={value!r}" for name, value in found.items())
        warnings.warn(
            f"{spelled}: vLLM draws from another distribution than softmax(logits / temperature), which is trained, "
            f"so the ratio of the two is no correction. vllm_importance_sampling_correction is off. Set it to False "
            f"to say so yourself.",
            stacklevel=5,
        )


def _generation_kwargs_are_known(config: Config) -> None:
    kwargs = as_dict(config.generation_kwargs)
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


def _generation_overrides_are_in_range(config: Config) -> None:
    kwargs = as_dict(config.generation_kwargs)
    for name in _OVERRIDABLE:
        key = override_key(name, config.use_vllm)
        if key not in kwargs or (name == "min_p" and kwargs[key] is None):
            continue
        value, interval = kwargs[key], RANGES[name]
        hint = int if name in ("top_k", "max_completion_length") else float
        if not _accepts(hint, value) or value not in interval:
            kind = "an integer" if hint is int else "a number"
            raise ValueError(f"`generation_kwargs` has {key}={value!r}, which must be {kind} in {interval}.")


def _samples_differ(config: Config) -> None:
    do_sample = as_dict(config.generation_kwargs).get("do_sample", True)
    if do_sample is not True and config.num_generations > 1:
        raise ValueError(
            f"`generation_kwargs` has do_sample={do_sample}: the {config.num_generations} completions of a prompt "
            f"would be the same. Remove it, or set num_generations to 1."
        )


def _cache_is_known(config: Config) -> None:
    cache = config._sampled_with("cache_implementation")
    if not config.use_vllm and cache is not None:
        check_choice("cache_implementation", cache, tuple(ALL_CACHE_IMPLEMENTATIONS))


def _chat_template_kwargs_are_free(config: Config) -> None:
    taken = sorted(_SET_BY_THE_LIBRARY & as_dict(config.chat_template_kwargs).keys())
    if taken:
        raise ValueError(f"`chat_template_kwargs` has {', '.join(taken)}, which the library sets itself. Remove it.")


def _default(config: Config, name: str) -> Any:
    return type(config).__dataclass_fields__[name].default


# In the order in which they are looked at: the first that fails speaks.
RULES: tuple[Callable[[Config], None], ...] = (
    _length_is_set,
    _reward_weights_are_finite,
    _templates_parse,
    _mode_fits_divergence,
    _teacher_server_can_serve,
    _beta_has_a_policy_term,
    _groups_are_large_enough,
    _teacher_settings_act,
    _demonstration_options_act,
    _feedback_options_act,
    _template_shows_the_context,
    _sequence_ratio_has_its_mean,
    _vllm_options_act,
    _engine_arguments_are_free,
    _inherited_options_act,
    _generation_kwargs_are_known,
    _generation_overrides_are_in_range,
    _sampler_correction_compares_like_with_like,
    _samples_differ,
    _cache_is_known,
    _chat_template_kwargs_are_free,
)
