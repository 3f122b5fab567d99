"""What SDPOConfig accepts of sampling: keywords of the sampler, vLLM, and a teacher that its server scores.

Rules as in `config_rules`.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from sdpo.config_rules import RANGES, Config, accepts, as_dict, check_choice, default_of

# --- keywords of the sampler --------------------------------------------------------------------------------------

_OVERRIDABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
_NO_SAMPLE = "training needs plain samples of the policy"
_ON_BEAMS = "it acts on beams, and training needs plain samples of the policy"
_DRAFTED = "it drafts the tokens of one prompt at a time, and a block has many"
_UNREAD = "only the sampled token ids are read"
_IN_ONE = "an answer is read in one piece"
_OWN_PROMPT = "what is trained on is the prompt of the dataset as it is"

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
    "logprob_token_ids": ((None,), _UNREAD),
    "return_token_ids": ((True,), "a completion is read by its token ids"),
    "stream": ((None, False), _IN_ONE),
    "stream_options": ((None,), _IN_ONE),
    "echo": ((None, False), "the answer would repeat the prompt"),
    "suffix": ((None,), _OWN_PROMPT),
    "prompt": ((), _OWN_PROMPT),
    "prompt_embeds": ((None,), _OWN_PROMPT),
    "truncate_prompt_tokens": ((None,), _OWN_PROMPT),
    "model": ((), "the server has one model, the policy"),
    "use_beam_search": ((None, False), _NO_SAMPLE),
}


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
    "response_format": None,  # what a server also calls them
    "guided_decoding": None,
    "thinking_token_budget": None,
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
        if not accepts(hint, value) or value not in interval:
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


# --- vLLM ---------------------------------------------------------------------------------------------------------


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
        "vllm_lora_as_adapter": "colocate",
        "vllm_check_weights": None,
    }
    for name in useless_without_vllm:
        value = getattr(config, name)
        if value == default_of(config, name):
            continue
        if not config.use_vllm:
            raise ValueError(
                f"{name}={value!r} cannot take effect with use_vllm=False. Set use_vllm to True, or leave {name} at "
                f"{default_of(config, name)!r}."
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
        if config.use_vllm and mode not in (None, config.vllm_mode) and value != default_of(config, name):
            raise ValueError(
                f"{name}={value!r} cannot take effect with vllm_mode={config.vllm_mode!r}. Set vllm_mode to {mode!r}, "
                f"or leave {name} at {default_of(config, name)!r}."
            )


def _adapter_outlives_sampling(config: Config) -> None:
    if config.vllm_lora_as_adapter and config.vllm_enable_sleep_mode:
        raise ValueError(
            "vllm_lora_as_adapter=True does not go with vllm_enable_sleep_mode=True: an engine that sleeps loses the "
            "model under the adapter too, so that all would be sent each time. Set one of them to False."
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
    "enable_lora": "`vllm_lora_as_adapter`",
    "max_loras": "`vllm_lora_as_adapter`",
    "max_lora_rank": "the adapter",
    "lora_target_modules": "the adapter",
}


def _engine_arguments_are_free(config: Config) -> None:
    for name, value in as_dict(config.vllm_engine_kwargs).items():
        if name in _ENGINE_ARGUMENTS:
            raise ValueError(
                f"`vllm_engine_kwargs` has {name}={value!r}, which is decided by {_ENGINE_ARGUMENTS[name]}."
            )


MAX_CHOSEN = 128  # ids whose log-probs vLLM gives at once


def _teacher_server_can_serve(config: Config) -> None:
    support, topk = config.teacher_server_support, config.distillation_topk
    if support == "student" and not (config.use_teacher_server and config.distillation_mode == "topk_logits"):
        raise ValueError(
            f"teacher_server_support='student' cannot take effect with use_teacher_server={config.use_teacher_server} "
            f"and distillation_mode={config.distillation_mode!r}: it says on whose top k a served teacher is read. "
            "Set them to True and 'topk_logits', or leave teacher_server_support at 'teacher'."
        )
    if support == "student" and topk is not None and topk > MAX_CHOSEN:
        raise ValueError(
            f"teacher_server_support='student' needs distillation_topk of at most {MAX_CHOSEN}, got {topk}: vLLM "
            "gives no more log-probs of chosen tokens at once. Lower it, or set teacher_server_support to 'teacher'."
        )
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


# In the order in which they are looked at: the first that fails speaks.
SAMPLING_RULES: tuple[Callable[[Config], None], ...] = (
    _teacher_server_can_serve,
    _vllm_options_act,
    _adapter_outlives_sampling,
    _engine_arguments_are_free,
    _generation_kwargs_are_known,
    _generation_overrides_are_in_range,
    _sampler_correction_compares_like_with_like,
    _samples_differ,
    _cache_is_known,
)
