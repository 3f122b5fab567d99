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
    "num_completions_to_print": _NOT_NEGATIVE,
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


def accepts(hint: Any, value: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(accepts(option, value) for option in get_args(hint))
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
        elif not accepts(hint, value):
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


def default_of(config: Config, name: str) -> Any:
    return type(config).__dataclass_fields__[name].default


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
    if not weights or not all(accepts(float, w) and math.isfinite(w) for w in weights):
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
        value, default = getattr(config, name), default_of(config, name)
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
        value, default = getattr(config, name), default_of(config, name)
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


def _table_options_act(config: Config) -> None:
    for name in ("num_completions_to_print", "log_unique_prompts"):
        value = getattr(config, name)
        if value != default_of(config, name) and not config.log_completions:
            raise ValueError(
                f"{name}={value!r} cannot take effect with log_completions=False. Set log_completions to True, or "
                f"leave {name} at {default_of(config, name)!r}."
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


_SET_BY_THE_LIBRARY = frozenset(
    {"tokenize", "add_generation_prompt", "return_dict", "return_tensors", "padding", "truncation", "max_length"}
)


def _chat_template_kwargs_are_free(config: Config) -> None:
    taken = sorted(_SET_BY_THE_LIBRARY & as_dict(config.chat_template_kwargs).keys())
    if taken:
        raise ValueError(f"`chat_template_kwargs` has {', '.join(taken)}, which the library sets itself. Remove it.")


# In the order in which they are looked at: the first that fails speaks.
RULES: tuple[Callable[[Config], None], ...] = (
    _length_is_set,
    _reward_weights_are_finite,
    _templates_parse,
    _mode_fits_divergence,
    _beta_has_a_policy_term,
    _groups_are_large_enough,
    _teacher_settings_act,
    _demonstration_options_act,
    _feedback_options_act,
    _template_shows_the_context,
    _sequence_ratio_has_its_mean,
    _table_options_act,
    _inherited_options_act,
    _chat_template_kwargs_are_free,
)
