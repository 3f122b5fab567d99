"""What SDPOConfig accepts, refuses and hands on. Each test is a claim; numbers are worked out beside it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import warnings
from pathlib import Path
from typing import get_args, get_type_hints

import generate_config_docs
import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments
from trl import ModelConfig, TrlParser

from sdpo.config import SECTIONS, SDPOConfig
from sdpo.config_rules import NAMES_ELSEWHERE, RANGES

ROOT = Path(__file__).resolve().parent.parent


def refused(match: str, /, **settings: object) -> str:
    """Asserts that SDPOConfig(**settings) raises a ValueError matching `match`; returns the message."""
    with pytest.raises(ValueError, match=match) as caught:
        SDPOConfig(**settings)
    return str(caught.value)


def parse(*args: str) -> SDPOConfig:
    (config,) = HfArgumentParser(SDPOConfig).parse_args_into_dataclasses(list(args), look_for_args_file=False)
    return config


# --- fields ---------------------------------------------------------------------------------------------------------

DEFAULTS = {
    "learning_rate": 5e-5,
    "logging_steps": 10,
    "gradient_checkpointing": True,
    "bf16": None,
    "average_tokens_across_devices": True,
    "report_to": "none",
    "remove_unused_columns": False,
    "beta": 0.0,
    "epsilon": 0.2,
    "epsilon_high": None,
    "importance_sampling_level": "token",
    "reward_weights": None,
    "scale_rewards": "group",
    "distillation_weight": 1.0,
    "distillation_alpha": 1.0,
    "distillation_mode": "sampled_token",
    "distillation_topk": None,
    "distillation_is_clip": 2.0,
    "distillation_add_tail": False,
    "teacher_model_kind": "ema",
    "teacher_update_rate": 0.05,
    "teacher_sync_steps": 1,
    "teacher_dtype": None,
    "use_successful_as_teacher": True,
    "demonstration_selection": "first",
    "demonstration_buffer_size": 0,
    "demonstration_column": None,
    "success_reward_threshold": 1.0,
    "dont_reprompt_on_self_success": True,
    "max_reprompt_len": 10240,
    "reprompt_template": "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
    "solution_template": "\nCorrect solution:\n\n{successful_previous_attempt}\n\n",
    "feedback_template": "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
    "include_environment_feedback": False,
    "environment_feedback_only_without_solution": False,
    "remove_thinking_from_demonstration": False,
    "diagnostics_warning_interval": 10,
    "diagnostics_flat_tolerance": 1e-8,
    "log_completions": False,
    "num_completions_to_print": None,
    "log_unique_prompts": False,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "disable_dropout": True,
    "max_prompt_length": 512,
    "shuffle_dataset": True,
    "num_generations": 8,
    "num_generations_eval": None,
    "max_completion_length": 256,
    "ds3_gather_for_generation": True,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "generation_kwargs": None,
    "chat_template_kwargs": None,
    "repetition_penalty": 1.0,
    "cache_implementation": None,
    "use_vllm": False,
    "use_teacher_server": False,
    "teacher_server_support": "teacher",
    "vllm_mode": "colocate",
    "vllm_model_impl": "vllm",
    "vllm_enable_sleep_mode": False,
    "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_group_port": 51216,
    "vllm_server_timeout": 240.0,
    "vllm_tensor_parallel_size": 1,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None,
    "vllm_engine_kwargs": None,
    "vllm_lora_as_adapter": False,
    "vllm_check_weights": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_cap": 2.0,
    "num_iterations": 1,
    "loss_type": "dapo",
    "mask_truncated_completions": False,
}


def own_names() -> list[str]:
    declared = {f.name for f in dataclasses.fields(SDPOConfig)}
    return [name for name in SDPOConfig.__annotations__ if name in declared]


def test_the_fields_their_order_and_their_defaults_are_those_of_the_documented_interface() -> None:
    declared = {f.name: f.default for f in dataclasses.fields(SDPOConfig)}
    assert own_names() == list(DEFAULTS)
    assert {name: declared[name] for name in DEFAULTS} == DEFAULTS


def test_every_field_of_the_peer_exists_with_its_default() -> None:
    from trl.experimental.sdpo import SDPOConfig as PeerConfig

    peer = {f.name: f.default for f in dataclasses.fields(PeerConfig)}
    ours = {f.name: f.default for f in dataclasses.fields(SDPOConfig)}
    training = {f.name for f in dataclasses.fields(TrainingArguments)} - set(DEFAULTS)
    assert set(peer) <= set(ours)
    assert {n: ours[n] for n in peer if n not in training} == {n: peer[n] for n in peer if n not in training}


def test_every_field_has_help_that_argparse_can_print() -> None:
    for f in dataclasses.fields(SDPOConfig):
        if f.name in DEFAULTS:
            assert f.metadata["help"].endswith(".") and "%" not in f.metadata["help"], f.name
    assert "--distillation_weight" in HfArgumentParser(SDPOConfig).format_help()


def test_other_training_arguments_keep_working_and_output_dir_is_the_first_position() -> None:
    config = SDPOConfig("out", use_cpu=True, max_steps=3, save_strategy="no", seed=7, weight_decay=0.1)
    assert (config.output_dir, config.max_steps, config.seed, config.weight_decay) == ("out", 3, 7, 0.1)
    assert config.device.type == "cpu" and config.report_to == []


def test_remove_unused_columns_is_left_to_the_trainer() -> None:
    assert SDPOConfig(remove_unused_columns=True).remove_unused_columns is True


def test_a_default_config_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = SDPOConfig()
    assert config.gradient_checkpointing is True


def test_gradient_checkpointing_can_be_switched_off_by_either_of_its_names() -> None:
    assert SDPOConfig(gradient_checkpointing=False).gradient_checkpointing is False
    assert SDPOConfig(activation_checkpointing=False).gradient_checkpointing is False
    with pytest.warns(UserWarning, match="activation_checkpointing=True wins"):
        SDPOConfig(gradient_checkpointing=False, activation_checkpointing=True)


@pytest.mark.parametrize(
    ("can", "settings", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"use_cpu": True}, False),
        (True, {"fp16": True}, False),
        (True, {"bf16": False}, False),
    ],
)
def test_bf16_is_on_where_fp16_is_off_and_the_device_can(monkeypatch, can, settings, expected) -> None:
    for module in ("sdpo.config", "transformers.training_args"):
        monkeypatch.setattr(f"{module}.is_torch_bf16_gpu_available", lambda: can)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: can)
    assert SDPOConfig(**settings).bf16 is expected


# --- values, one at a time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("teacher_model_kind", "emma", "ema"),
        ("importance_sampling_level", "sequense", "sequence"),
        ("loss_type", "grop", "grpo"),
        ("distillation_mode", "full_logit", "full_logits"),
        ("vllm_mode", "colocated", "colocate"),
        ("vllm_model_impl", "transformer", "transformers"),
        ("vllm_importance_sampling_mode", "token_trunc", "token_truncate"),
        ("scale_rewards", "groups", "group"),
        ("cache_implementation", "dynamics", "dynamic"),
    ],
)
def test_a_wrong_choice_is_refused_with_the_allowed_values_and_the_one_meant(name, value, meant) -> None:
    message = refused(f"`{name}` must be one of", **{name: value})
    assert repr(value) in message and message.endswith(f"Did you mean {meant!r}?")


def test_every_literal_field_lists_its_choices() -> None:
    hints = get_type_hints(SDPOConfig)
    for name in ("teacher_model_kind", "importance_sampling_level", "loss_type", "distillation_mode", "vllm_mode"):
        message = refused(name, **{name: "?"})
        assert all(repr(choice) in message for choice in get_args(hints[name]))


BELOW_OR_ABOVE = {
    "per_device_train_batch_size": [0],
    "per_device_eval_batch_size": [0],
    "gradient_accumulation_steps": [0],
    "learning_rate": [-1.0],
    "beta": [-0.1],
    "epsilon": [0.0, -0.1],
    "epsilon_high": [-0.1],
    "distillation_weight": [-0.1, 1.1],
    "distillation_alpha": [-0.1, 1.5],
    "distillation_topk": [0],
    "distillation_is_clip": [0.0, -1.0],
    "teacher_update_rate": [-0.1, 7.0],
    "teacher_sync_steps": [0],
    "success_reward_threshold": [],
    "max_reprompt_len": [0],
    "demonstration_buffer_size": [-1],
    "diagnostics_warning_interval": [-1],
    "diagnostics_flat_tolerance": [-1e-9],
    "num_completions_to_print": [-1],
    "max_prompt_length": [0],
    "num_generations": [0],
    "num_generations_eval": [0],
    "max_completion_length": [0],
    "generation_batch_size": [0],
    "steps_per_generation": [0],
    "temperature": [0.0, -1.0],
    "top_p": [0.0, 1.1],
    "top_k": [-1],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0.0],
    "vllm_server_port": [0, 65536],
    "vllm_group_port": [0, 65536],
    "vllm_server_timeout": [0.0],
    "vllm_tensor_parallel_size": [0],
    "vllm_gpu_memory_utilization": [0.0, 1.1],
    "vllm_max_model_length": [0],
    "vllm_importance_sampling_cap": [0.0],
    "num_iterations": [0],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BELOW_OR_ABOVE.items() for v in values])
def test_a_number_out_of_range_is_refused_with_the_range_and_the_value(name, value) -> None:
    message = refused(f"`{name}` must be in ", **{name: value})
    assert str(RANGES[name]) in message and f"got {value}" in message


def test_every_number_of_the_config_has_a_range() -> None:
    hints = get_type_hints(SDPOConfig)
    numbers = {n for n in DEFAULTS if {int, float} & {hints[n], *get_args(hints[n])}} - {"logging_steps"}
    assert numbers - {"reward_weights"} <= set(RANGES) == set(BELOW_OR_ABOVE)


@pytest.mark.parametrize("name", [n for n, v in DEFAULTS.items() if isinstance(v, float)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused(name, value) -> None:
    refused(f"`{name}` must be in ", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("distillation_weight", 0), ("teacher_update_rate", 0.0), ("teacher_update_rate", 1.0), ("top_p", 0.5),
     ("epsilon_high", 0.0), ("min_p", 0.0), ("max_prompt_length", None), ("diagnostics_warning_interval", 0),
     ("success_reward_threshold", -3.0), ("distillation_is_clip", None), ("loss_type", "bnpo")],
)  # fmt: skip
def test_the_ends_of_the_ranges_are_accepted(name, value) -> None:
    assert getattr(SDPOConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_vllm", "false"), ("num_generations", 8.5), ("num_generations", True), ("temperature", "1.0"),
     ("temperature", None), ("reprompt_template", None), ("chat_template_kwargs", ["a"]), ("reward_weights", 1.0)],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused(name, value) -> None:
    message = refused(f"`{name}` must be of type ", **{name: value})
    assert f"got {value!r}" in message


def test_no_limit_of_completions_is_refused() -> None:
    refused("`max_completion_length` is None", max_completion_length=None)


@pytest.mark.parametrize("weights", [[1.0, float("nan")], [float("inf")], ["1"], [True], []])
def test_reward_weights_are_finite_numbers(weights) -> None:
    refused("`reward_weights`", reward_weights=weights)


@pytest.mark.parametrize(
    ("given", "kept"),
    [(True, "group"), (False, "none"), ("true", "group"), ("False", "none"), ("batch", "batch"), ("none", "none")],
)
def test_scale_rewards_takes_booleans_and_names(given, kept) -> None:
    assert SDPOConfig(scale_rewards=given).scale_rewards == kept


# --- rules between settings -----------------------------------------------------------------------------------------


def test_sampled_token_is_the_reverse_kl_only() -> None:
    refused("sampled_token.*distillation_alpha=1.0; got 0.5", distillation_alpha=0.5)
    assert SDPOConfig(distillation_mode="full_logits", distillation_alpha=0.5).distillation_alpha == 0.5


def test_topk_goes_with_topk_logits_and_with_nothing_else() -> None:
    refused("needs `distillation_topk`", distillation_mode="topk_logits")
    refused("distillation_topk=20 cannot take effect", distillation_topk=20)
    refused("distillation_topk=20 cannot take effect", distillation_topk=20, distillation_mode="full_logits")
    refused("distillation_add_tail=True cannot take effect", distillation_add_tail=True)
    config = SDPOConfig(distillation_mode="topk_logits", distillation_topk=20, distillation_add_tail=True)
    assert config.objective.topk == 20 and config.objective.add_tail


def test_beta_needs_a_policy_term() -> None:
    refused("beta=0.1 cannot take effect with distillation_weight=1.0", beta=0.1)
    assert SDPOConfig(beta=0.1, distillation_weight=0.5).objective.beta == 0.1


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("base", "teacher_update_rate", 0.1), ("live", "teacher_update_rate", 0.1), ("base", "teacher_sync_steps", 4),
     ("live", "teacher_sync_steps", 4), ("trust_region", "teacher_sync_steps", 4)],
)  # fmt: skip
def test_a_teacher_that_is_no_average_has_no_use_for_the_averages_settings(kind, name, value) -> None:
    refused(f"{name}={value} cannot take effect with teacher_model_kind='{kind}'", teacher_model_kind=kind,
            **{name: value})  # fmt: skip
    config = SDPOConfig(teacher_model_kind=kind, distillation_weight=0.0, **{name: value})
    assert getattr(config, name) == value


def test_the_trust_region_mixes_by_the_update_rate() -> None:
    assert SDPOConfig(teacher_model_kind="trust_region", teacher_update_rate=0.1).teacher.update_rate == 0.1


def test_distillation_settings_may_stay_when_the_weight_is_set_to_0_for_a_baseline() -> None:
    config = SDPOConfig(
        distillation_weight=0.0, distillation_mode="topk_logits", distillation_topk=20, distillation_add_tail=True,
        distillation_alpha=0.5, distillation_is_clip=3.0, teacher_update_rate=0.01, teacher_sync_steps=4,
    )  # fmt: skip
    assert config.objective.weight == 0


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_group_of_one_has_no_baseline(weight) -> None:
    refused("group of one has no baseline", num_generations=1, distillation_weight=weight,
            include_environment_feedback=True)  # fmt: skip


def test_one_completion_a_prompt_is_fine_in_evaluation() -> None:
    assert SDPOConfig(num_generations_eval=1, distillation_weight=0.5, eval_strategy="steps").num_generations_eval == 1


def test_a_choice_among_successes_needs_successes() -> None:
    shown = {"use_successful_as_teacher": False, "demonstration_column": "worked"}
    refused("demonstration_selection='best' cannot take effect", **shown, demonstration_selection="best")
    refused("demonstration_buffer_size=3 cannot take effect", **shown, demonstration_buffer_size=3)
    refused("`demonstration_selection` must be one of", demonstration_selection="longest")
    refused("`demonstration_buffer_size` must be", demonstration_buffer_size=-1)
    SDPOConfig(**shown)


def test_feedback_only_without_solution_needs_feedback() -> None:
    refused("cannot take effect with include_environment_feedback=", environment_feedback_only_without_solution=True)
    SDPOConfig(environment_feedback_only_without_solution=True, include_environment_feedback=True)


def test_one_ratio_a_sequence_with_a_token_mean_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="GSPO is loss_type='grpo'"):
        SDPOConfig(importance_sampling_level="sequence")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SDPOConfig(importance_sampling_level="sequence", loss_type="grpo")


@pytest.mark.parametrize(
    "settings",
    [{"vllm_enable_sleep_mode": True}, {"vllm_mode": "server"}, {"vllm_server_base_url": "http://localhost:8000"},
     {"vllm_server_host": "10.0.0.1"}, {"vllm_lora_as_adapter": True}],
)  # fmt: skip
def test_what_asks_for_vllm_needs_vllm(settings) -> None:
    refused("cannot take effect with use_vllm=False. Set use_vllm to True", **settings)


def test_what_only_sizes_vllm_may_stay_when_it_is_switched_off() -> None:
    SDPOConfig(vllm_gpu_memory_utilization=0.5, vllm_tensor_parallel_size=2, vllm_max_model_length=4096)


def test_each_vllm_mode_refuses_what_the_other_is_asked_for() -> None:
    refused("vllm_enable_sleep_mode=True cannot take effect with vllm_mode='server'", use_vllm=True,
            vllm_mode="server", vllm_enable_sleep_mode=True)  # fmt: skip
    refused("vllm_server_base_url.*cannot take effect with vllm_mode='colocate'", use_vllm=True,
            vllm_server_base_url="http://localhost:8000")  # fmt: skip
    refused("vllm_lora_as_adapter=True cannot take effect with vllm_mode='server'", use_vllm=True,
            vllm_mode="server", vllm_lora_as_adapter=True)  # fmt: skip
    SDPOConfig(use_vllm=True, vllm_enable_sleep_mode=True)
    SDPOConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://localhost:8000")


def test_settings_of_model_generate_do_not_go_with_vllm() -> None:
    refused("ds3_gather_for_generation=False does not go", use_vllm=True, ds3_gather_for_generation=False)
    refused("cache_implementation='static' cannot take effect", use_vllm=True, cache_implementation="static")
    assert SDPOConfig(cache_implementation="static").sampling.cache_implementation == "static"


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_objective_corrects_for_vllm_as_asked_and_for_no_other_sampler(mode) -> None:
    settings = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_cap": 3.0}
    objective = SDPOConfig(use_vllm=True, **settings).objective
    assert (objective.sampler_correction, objective.sampler_cap) == (mode, 3.0)
    assert SDPOConfig(**settings).objective.sampler_correction is None
    off = SDPOConfig(use_vllm=True, vllm_importance_sampling_correction=False, **settings)
    assert off.objective.sampler_correction is None


RESHAPED = [
    ({"top_p": 0.8}, "top_p=0.8"),
    ({"top_k": 20}, "top_k=20"),
    ({"min_p": 0.05}, "min_p=0.05"),
    ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
    ({"generation_kwargs": {"top_p": 0.8}}, "top_p=0.8"),
    ({"generation_kwargs": {"logit_bias": {1: 2.0}}}, "logit_bias={1: 2.0}"),
    ({"generation_kwargs": {"presence_penalty": -0.5}}, "presence_penalty=-0.5"),
    ({"generation_kwargs": {"response_format": {"type": "json_object"}}}, "response_format={'type': 'json_object'}"),
    ({"generation_kwargs": {"thinking_token_budget": 8}}, "thinking_token_budget=8"),
    ({"top_p": 0.8, "top_k": 20}, "top_p=0.8, top_k=20"),
]


@pytest.mark.parametrize(("settings", "named"), RESHAPED)
def test_the_correction_is_off_with_one_warning_where_vllm_draws_from_another_distribution(settings, named) -> None:
    with pytest.warns(UserWarning) as caught:
        config = SDPOConfig(use_vllm=True, **settings)
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(f"{named}: ") and "vllm_importance_sampling_correction is off" in message
    assert config.objective.sampler_correction is None


@pytest.mark.parametrize(
    "settings",
    [
        {"use_vllm": True},
        {"use_vllm": True, "top_p": 0.8, "generation_kwargs": {"top_p": 1.0}},  # the override wins
        {"use_vllm": True, "top_k": 20, "min_p": 0.1, "generation_kwargs": {"top_k": 0, "min_p": None}},
        {"use_vllm": True, "temperature": 0.7, "min_p": 0.0, "generation_kwargs": {"seed": 1, "bad_words": []}},
        {"use_vllm": True, "top_p": 0.8, "vllm_importance_sampling_correction": False},
        {"top_p": 0.8, "top_k": 20},  # no vLLM
    ],
)
def test_there_is_no_warning_where_the_correction_acts_or_was_not_to_act(settings) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = SDPOConfig(**settings)
    is_on = config.use_vllm and config.vllm_importance_sampling_correction
    assert config.objective.sampler_correction == ("token_truncate" if is_on else None)


SERVED = {"use_teacher_server": True, "use_vllm": True, "vllm_mode": "server", "teacher_model_kind": "live"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_vllm": False}, "the one that is asked"),
        ({"vllm_mode": "colocate"}, "does not serve"),
        ({"teacher_model_kind": "ema"}, "current weights and no others"),
        ({"teacher_model_kind": "base"}, "current weights and no others"),
        ({"teacher_model_kind": "trust_region"}, "current weights and no others"),
        ({"distillation_weight": 0.5}, "policy term is not computed"),
        ({"distillation_mode": "full_logits"}, "not the vocabulary"),
    ],
)
def test_the_teacher_server_says_why_it_refuses(change, reason) -> None:
    (name,) = change
    message = refused(f"use_teacher_server=True needs {name}=", **{**SERVED, **change})
    assert reason in message


def test_a_served_teacher_has_no_temperature() -> None:
    assert "ignore the temperature" in refused("needs temperature=1.0", **SERVED, temperature=0.7)
    assert "ignore the temperature" in refused("temperature=1.0", **SERVED, generation_kwargs={"temperature": 2.0})


@pytest.mark.parametrize("kwargs", [{"stop_token_ids": [1]}, {"ignore_eos": True}, {"logprobs": None}])
def test_what_would_break_the_reading_of_an_engines_answers_is_refused(kwargs) -> None:
    refused(f"`generation_kwargs` has {next(iter(kwargs))}", use_vllm=True, generation_kwargs=kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"stream": True},
        {"stream_options": {"include_usage": True}},
        {"echo": True},
        {"suffix": "."},
        {"prompt": "1 + 1"},
        {"prompt_embeds": "AA=="},
        {"truncate_prompt_tokens": 4},
        {"model": "another"},
        {"use_beam_search": True},
        {"return_token_ids": False},
        {"logprob_token_ids": [1]},
    ],
)
def test_what_would_make_a_server_answer_something_else_is_refused(kwargs) -> None:
    served = {"use_vllm": True, "vllm_mode": "server"}
    refused(f"`generation_kwargs` has {next(iter(kwargs))}", **served, generation_kwargs=kwargs)


def test_what_is_a_servers_default_is_taken() -> None:
    kwargs = {"stream": False, "echo": False, "use_beam_search": False, "truncate_prompt_tokens": None}
    SDPOConfig(use_vllm=True, vllm_mode="server", generation_kwargs=kwargs)


def test_a_setting_of_the_other_vllm_mode_is_refused() -> None:
    refused("vllm_tensor_parallel_size=2", use_vllm=True, vllm_mode="server", vllm_tensor_parallel_size=2)
    refused("vllm_server_timeout=1.0", use_vllm=True, vllm_server_timeout=1.0)
    SDPOConfig(vllm_server_timeout=1.0, vllm_gpu_memory_utilization=0.5)


def test_an_adapter_is_not_sent_to_an_engine_that_forgets_what_is_under_it() -> None:
    refused("vllm_lora_as_adapter=True does not go with vllm_enable_sleep_mode=True", use_vllm=True,
            vllm_lora_as_adapter=True, vllm_enable_sleep_mode=True)  # fmt: skip
    refused("`vllm_engine_kwargs` has enable_lora=True, which is decided by `vllm_lora_as_adapter`", use_vllm=True,
            vllm_engine_kwargs={"enable_lora": True})  # fmt: skip


def test_the_students_top_k_is_served_for_a_top_k_that_vllm_takes() -> None:
    topk = {"distillation_mode": "topk_logits", "distillation_topk": 128}
    SDPOConfig(**SERVED, **topk, teacher_server_support="student")
    refused("distillation_topk of at most 128, got 129", **SERVED, **{**topk, "distillation_topk": 129},
            teacher_server_support="student")  # fmt: skip
    refused("teacher_server_support='student' cannot take effect with use_teacher_server=False", **topk,
            teacher_server_support="student")  # fmt: skip
    refused("and distillation_mode='sampled_token'", **SERVED, teacher_server_support="student")
    SDPOConfig(**SERVED, **{**topk, "distillation_topk": 129})


def test_the_teacher_server_serves_sampled_token_and_topk() -> None:
    SDPOConfig(**SERVED)
    SDPOConfig(**SERVED, distillation_mode="topk_logits", distillation_topk=20)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("label_smoothing_factor", 0.1, "no labels"),
        ("label_names", ["labels"], "no labels"),
        ("train_sampling_strategy", "group_by_length", "`shuffle_dataset` decides"),
        ("length_column_name", "size", "`shuffle_dataset` decides"),
        ("include_for_metrics", ["inputs"], "no predictions are kept"),
        ("batch_eval_metrics", True, "no predictions are kept"),
        ("eval_do_concat_batches", False, "no predictions are kept"),
        ("eval_use_gather_object", True, "no predictions are kept"),
        ("eval_accumulation_steps", 2, "no predictions are kept"),
    ],
)
def test_inherited_options_that_would_do_nothing_are_refused_with_the_reason(name, value, reason) -> None:
    assert reason in refused(f"{name}=.* cannot take effect", **{name: value})


# --- blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "block", "steps"),
    [
        ({}, 8, 1),  # 8 * 1 process * 1
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}, 16, 4),  # 4 * 1 * 4
        ({"per_device_train_batch_size": 4, "steps_per_generation": 6}, 24, 6),  # 4 * 1 * 6
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "generation_batch_size": 32}, 32, 32),
        ({"per_device_train_batch_size": 4, "generation_batch_size": 16, "steps_per_generation": 4}, 16, 4),
    ],
)
def test_block_size_and_number_of_microbatches_follow_from_each_other(settings, block, steps) -> None:
    config = SDPOConfig(**settings)
    assert (config.generation_batch_size, config.steps_per_generation) == (block, steps)


def test_the_number_of_processes_counts(monkeypatch) -> None:
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 3))
    assert SDPOConfig(per_device_train_batch_size=8, steps_per_generation=2).generation_batch_size == 48  # 8 * 3 * 2
    message = refused("global batch.*= 24", generation_batch_size=32)
    assert "a multiple of 24, such as 24 or 48" in message  # lcm(8 * 3, 8) = 24


def test_a_block_that_contradicts_its_number_of_microbatches_is_refused() -> None:
    message = refused("contradict each other", generation_batch_size=8, steps_per_generation=2)
    assert "= 16" in message and "the other to None" in message  # 8 * 1 * 2


def test_a_block_holds_whole_microbatches_and_whole_groups() -> None:
    message = refused("generation_batch_size \\(12\\) is not divisible", generation_batch_size=12)
    assert "such as 8 or 16" in message
    message = refused("not divisible by num_generations \\(3\\)", num_generations=3)
    assert "a multiple of 24" in message and "[1, 2, 4, 8]" in message


def test_the_size_of_an_evaluation_batch_is_left_to_the_trainer() -> None:
    config = SDPOConfig(eval_strategy="steps", per_device_eval_batch_size=6)  # 6 is not divisible by 8
    assert config.do_eval is True and config.per_device_eval_batch_size == 6


def test_a_machine_without_an_accelerator_trains_on_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert SDPOConfig().use_cpu is True
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert SDPOConfig().use_cpu is False and SDPOConfig(use_cpu=True).use_cpu is True


# --- templates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "template", "piece", "allowed"),
    [
        (
            "reprompt_template",
            r"{prompt}{solution} Put it in \boxed{}",
            r"\\boxed{}",
            "{prompt}, {solution}, {feedback}",
        ),
        ("reprompt_template", r"{prompt}{solution} \frac{1}{2}", r"\\frac{1}", "{prompt}, {solution}, {feedback}"),
        ("solution_template", "{successful_previous_attempt} {}", "{}", "{successful_previous_attempt}"),
        ("solution_template", "{0}", "{0}", "{successful_previous_attempt}"),
        ("solution_template", "{successful_previous_attempt!r}", "{successful_previous_attempt!r}", "{successful"),
        ("feedback_template", "{feedback_raw:>9}", "{feedback_raw:>9}", "{feedback_raw}"),
        ("feedback_template", "{feedback_raw.x}", "{feedback_raw.x}", "{feedback_raw}"),
        ("feedback_template", "{feedback_raw[0]}", "{feedback_raw[0]}", "{feedback_raw}"),
        ("feedback_template", "{solution}", "{solution}", "{feedback_raw}"),
    ],
)
def test_a_brace_that_is_no_placeholder_is_named_with_what_is_allowed(name, template, piece, allowed) -> None:
    message = refused(f"`{name}` holds", **{name: template})
    assert f"'{piece}'" in message and allowed in message and r"\boxed{{}}" in message


@pytest.mark.parametrize("template", ["{prompt", "prompt}", "{prompt}{solution} {", "{{prompt}"])
def test_an_unmatched_brace_is_refused(template) -> None:
    message = refused("`reprompt_template` holds an unmatched brace", reprompt_template=template)
    assert "write a literal brace twice" in message


def test_a_misspelt_placeholder_is_recognized() -> None:
    assert "Did you mean 'solution'?" in refused("no placeholder", reprompt_template="{prompt}{solutoin}")


@pytest.mark.parametrize(
    ("name", "template", "required"),
    [("reprompt_template", "{solution}", "{prompt}"), ("solution_template", "Look:", "{successful_previous_attempt}"),
     ("feedback_template", "", "{feedback_raw}")],
)  # fmt: skip
def test_the_required_placeholder_has_to_be_there(name, template, required) -> None:
    assert required in refused(f"`{name}` must contain", **{name: template})


def test_doubled_braces_and_repeated_placeholders_are_fine() -> None:
    template = r"{prompt}{solution}{feedback} Put it in \boxed{{}}. Again: {solution}"
    text = SDPOConfig(reprompt_template=template).reprompt.reprompt_template
    assert text.format(prompt="P{}", solution="S", feedback="F") == r"P{}SF Put it in \boxed{}. Again: S"


def test_the_question_stands_once_in_the_template() -> None:
    message = refused("`reprompt_template` must contain", reprompt_template="{prompt}{solution} Again: {prompt}")
    assert "{prompt} exactly once, found 2 times" in message


def test_a_template_shows_what_is_switched_on() -> None:
    refused("use_successful_as_teacher=True cannot take effect", reprompt_template="{prompt}{feedback}")
    refused("include_environment_feedback=True cannot take effect", reprompt_template="{prompt}{solution}",
            include_environment_feedback=True)  # fmt: skip
    refused("demonstration_column='worked' cannot take effect", reprompt_template="{prompt}",
            use_successful_as_teacher=False, demonstration_column="worked")  # fmt: skip
    SDPOConfig(reprompt_template="{prompt}{solution}")
    SDPOConfig(reprompt_template="{prompt}", distillation_weight=0.0)


# --- generation and chat template keywords --------------------------------------------------------------------------


def test_an_unknown_generation_keyword_is_named_with_close_ones() -> None:
    message = refused("'max_tokens', which GenerationConfig does not know", generation_kwargs={"max_tokens": 5})
    assert "max_new_tokens" in message
    refused("'topp'", generation_kwargs={"topp": 0.9})
    SDPOConfig(use_vllm=True, generation_kwargs={"max_tokens": 5, "min_tokens": 0})


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"num_beams": 4}, "plain samples of the policy"),
        ({"num_beam_groups": 2}, "plain samples of the policy"),
        ({"penalty_alpha": 0.6}, "plain samples of the policy"),
        ({"num_return_sequences": 2}, "`num_generations` says"),
        ({"max_length": 100}, "`max_completion_length`"),
        ({"return_dict_in_generate": True}, "only the sampled token ids"),
        ({"output_scores": True}, "only the sampled token ids"),
        ({"early_stopping": True}, "acts on beams"),
        ({"length_penalty": 2.0}, "acts on beams"),
        ({"prompt_lookup_num_tokens": 3}, "one prompt at a time"),
        ({"token_healing": True}, "rewrites the end of the prompt"),
        ({"stop_strings": ["\n"]}, "end-of-sequence token or is truncated"),
        ({"eos_token_id": 5}, "set model.generation_config.eos_token_id"),
        ({"eos_token_id": None}, "set model.generation_config.eos_token_id"),
        ({"pad_token_id": 0}, "set its pad_token"),
        ({"bos_token_id": 0}, "set its bos_token"),
        ({"do_sample": False}, "would be the same"),
        ({"temperature": 0}, r"temperature=0, which must be a number in (0, inf)"),
        ({"temperature": None}, "temperature=None, which must be a number"),
        ({"top_k": -1}, "top_k=-1, which must be an integer in [0, inf)"),
        ({"max_new_tokens": 0}, "max_new_tokens=0, which must be an integer in [1, inf)"),
    ],
)
def test_generation_keywords_that_make_no_sense_for_training_are_refused_with_the_reason(kwargs, reason) -> None:
    assert reason in refused("`generation_kwargs` has", generation_kwargs=kwargs)


@pytest.mark.parametrize("kwargs", [{"n": 2}, {"max_new_tokens": 5}, {"do_sample": True}])
def test_generation_keywords_that_vllm_does_not_take_are_refused(kwargs) -> None:
    refused("`generation_kwargs` has", use_vllm=True, generation_kwargs=kwargs)


def test_harmless_generation_keywords_pass() -> None:
    kwargs = {"num_beams": 1, "suppress_tokens": [3], "do_sample": True, "min_p": None, "output_scores": False}
    assert SDPOConfig(generation_kwargs=kwargs).sampling.generation_kwargs == kwargs
    SDPOConfig(generation_kwargs={"do_sample": False}, num_generations=1, include_environment_feedback=True)


def test_chat_template_keywords_of_the_library_itself_are_refused() -> None:
    refused("`chat_template_kwargs` has tokenize", chat_template_kwargs={"tokenize": True, "enable_thinking": False})


# --- names from elsewhere -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("alpha", "distillation_alpha"),
        ("is_clip", "distillation_is_clip"),
        ("topk", "distillation_topk"),
        ("teacher_mode", "teacher_model_kind"),
        ("teacher_regularization", "teacher_model_kind"),
        ("ema_rate", "teacher_update_rate"),
        ("ema_update_rate", "teacher_update_rate"),
        ("max_reprompt_length", "max_reprompt_len"),
        ("dont_reprompt", "dont_reprompt_on_self_success"),
        ("full_logit_distillation", "distillation_mode"),
        ("sdpo_policy_loss_mode", "distillation_weight"),
        ("apply_chat_template_kwargs", "chat_template_kwargs"),
        ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
        ("num_generation", "num_generations"),  # a slip, not another library's name
    ],
)
def test_a_name_from_elsewhere_is_answered_with_ours(theirs, ours) -> None:
    with pytest.raises(TypeError, match=f"no field `{theirs}`: did you mean `{ours}`"):
        SDPOConfig(**{theirs: 1})


def test_every_name_from_elsewhere_is_unknown_here_and_leads_to_a_field() -> None:
    known = {f.name for f in dataclasses.fields(SDPOConfig)}
    assert not known & set(NAMES_ELSEWHERE)
    assert {hint.split("`")[1] for hint in NAMES_ELSEWHERE.values()} <= known


def test_all_unknown_names_are_reported_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        SDPOConfig(alpha=0.5, zzzz=1)
    assert str(caught.value).splitlines() == [
        "SDPOConfig has no field `alpha`: did you mean `distillation_alpha`?",
        "SDPOConfig has no field `zzzz`.",
    ]


def test_the_signature_is_still_the_dataclass_one() -> None:
    parameters = list(inspect.signature(SDPOConfig).parameters)
    assert parameters == [f.name for f in dataclasses.fields(SDPOConfig) if f.init]


# --- copies, files, command lines -----------------------------------------------------------------------------------

RESOLVED = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "scale_rewards": False, "epsilon": 0.3,
    "model_init_kwargs": {"dtype": torch.float32, "revision": "main"}, "generation_kwargs": {"top_p": 0.9},
    "eval_strategy": "steps",
}  # fmt: skip


def test_replace_keeps_what_it_does_not_change() -> None:
    config = SDPOConfig(**RESOLVED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed = dataclasses.replace(config, learning_rate=1e-6)
    assert changed.learning_rate == 1e-6
    assert dataclasses.replace(changed, learning_rate=config.learning_rate).to_dict() == config.to_dict()


def test_replace_of_epsilon_leaves_no_stale_upper_range() -> None:
    config = dataclasses.replace(SDPOConfig(epsilon=0.2), epsilon=0.1)
    assert (config.objective.epsilon, config.objective.epsilon_high) == (0.1, 0.1)
    assert SDPOConfig(epsilon_high=0.28).objective.epsilon_high == 0.28


@pytest.mark.parametrize(
    ("settings", "changes", "block", "steps"),
    [
        ({}, {"gradient_accumulation_steps": 4}, 32, 4),  # 8 * 4
        ({}, {"per_device_train_batch_size": 16}, 16, 1),  # 16 * 1
        ({}, {"steps_per_generation": 2}, 16, 2),  # 8 * 2
        ({}, {"generation_batch_size": 24}, 24, 3),  # 24 / 8
        ({"steps_per_generation": 2}, {"per_device_train_batch_size": 4}, 8, 2),  # 4 * 2: the steps were set
        ({"steps_per_generation": 2}, {"gradient_accumulation_steps": 4}, 16, 2),
        ({"generation_batch_size": 16}, {"per_device_train_batch_size": 4}, 16, 4),  # 16 / 4: the block was set
        ({"generation_batch_size": 16, "steps_per_generation": 2}, {"gradient_accumulation_steps": 4}, 16, 2),
    ],
)
@pytest.mark.parametrize("copied", [lambda c: c, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)),
                                    lambda c: dataclasses.replace(c, seed=1)])  # fmt: skip
def test_replace_follows_anew_where_nobody_set_the_block(settings, changes, block, steps, copied) -> None:
    config = dataclasses.replace(copied(SDPOConfig(**settings)), **changes)
    assert (config.generation_batch_size, config.steps_per_generation) == (block, steps)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"generation_batch_size": 16}, {"steps_per_generation": 4}),  # 8 * 4 is not 16
        ({"steps_per_generation": 2}, {"generation_batch_size": 32}),  # 8 * 2 is not 32
        ({"generation_batch_size": 16, "steps_per_generation": 2}, {"per_device_train_batch_size": 4}),  # 4 * 2
    ],
)
def test_replace_that_contradicts_what_was_set_is_refused(settings, changes) -> None:
    with pytest.raises(ValueError, match="contradict each other"):
        dataclasses.replace(SDPOConfig(**settings), **changes)


def test_a_number_taken_from_another_config_is_a_setting() -> None:
    steps = SDPOConfig(gradient_accumulation_steps=4).steps_per_generation
    assert SDPOConfig(steps_per_generation=steps).generation_batch_size == 32  # 8 * 4


def test_the_block_reads_as_plain_numbers() -> None:
    values = SDPOConfig().to_dict()
    assert type(values["generation_batch_size"]) is type(values["steps_per_generation"]) is int
    assert json.loads(SDPOConfig().to_json_string())["generation_batch_size"] == 8


def test_to_dict_and_json_hold_plain_values_that_make_the_same_config() -> None:
    config = SDPOConfig(**RESOLVED)
    values = json.loads(config.to_json_string())
    assert values["model_init_kwargs"] == {"dtype": "float32", "revision": "main"}
    assert SDPOConfig(**values).to_dict() == config.to_dict()


def test_the_callers_dicts_are_never_changed() -> None:
    nested = {"dtype": torch.float32, "more": {"dtype": torch.bfloat16}}
    before = copy.deepcopy(nested)
    config = SDPOConfig(model_init_kwargs=nested)
    config.to_dict(), config.to_json_string(), config.to_sanitized_dict()
    assert nested == before and config.model_init_kwargs == before
    nested["attn_implementation"] = "eager"
    assert config.model_init_kwargs == before


def test_a_config_survives_pickling_and_torch_save(tmp_path) -> None:
    config = SDPOConfig(**RESOLVED)
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    torch.save(config, tmp_path / "training_args.bin")
    assert torch.load(tmp_path / "training_args.bin", weights_only=False) == config


def test_a_dataclass_derived_from_it_works() -> None:
    @dataclasses.dataclass
    class Mine(SDPOConfig):
        extra: int = 3

    assert Mine(extra=4, num_generations=4).extra == 4


def test_an_empty_command_line_gives_the_defaults() -> None:
    assert parse().to_dict() == SDPOConfig().to_dict()


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (["--scale_rewards", "group"], "scale_rewards", "group"),
        (["--scale_rewards", "true"], "scale_rewards", "group"),
        (["--scale_rewards", "false"], "scale_rewards", "none"),
        (["--scale_rewards", "batch"], "scale_rewards", "batch"),
        (["--reward_weights", "1", "0.5"], "reward_weights", [1.0, 0.5]),
        (["--model_init_kwargs", '{"dtype": "float32"}'], "model_init_kwargs", {"dtype": "float32"}),
        (["--model_init_kwargs", '{"revision": "0123"}'], "model_init_kwargs", {"revision": "0123"}),
        (["--generation_kwargs", '{"top_p": 0.9}'], "generation_kwargs", {"top_p": 0.9}),
        (["--chat_template_kwargs", '{"enable_thinking": false}'], "chat_template_kwargs", {"enable_thinking": False}),
        (["--epsilon_high", "0.28"], "epsilon_high", 0.28),
        (["--min_p", "0.1"], "min_p", 0.1),
        (["--num_generations_eval", "2"], "num_generations_eval", 2),
        (["--vllm_max_model_length", "4096"], "vllm_max_model_length", 4096),
        (["--teacher_model_kind", "trust_region"], "teacher_model_kind", "trust_region"),
        (["--no_disable_dropout"], "disable_dropout", False),
        (["--use_successful_as_teacher"], "use_successful_as_teacher", True),
        (["--include-environment-feedback", "true"], "include_environment_feedback", True),
        (["--bf16", "false"], "bf16", False),
        (["--report_to", "none"], "report_to", []),
    ],
)
def test_a_flag_parses(args, name, value) -> None:
    assert getattr(parse(*args), name) == value


@pytest.mark.parametrize("text", ["{", "[1]", "a file"])
def test_a_dict_flag_that_is_no_json_object_is_refused(text) -> None:
    with pytest.raises(ValueError, match="`generation_kwargs` must be a dict or a JSON object"):
        parse("--generation_kwargs", text)


@pytest.mark.parametrize("flag", ["--teacher_model_kind", "--loss_type", "--distillation_mode"])
def test_a_wrong_choice_on_the_command_line_lists_the_choices(flag, capsys) -> None:
    with pytest.raises(SystemExit):
        parse(flag, "emma")
    assert "choose from" in capsys.readouterr().err


def test_the_documented_command_line_parses_with_trl() -> None:
    parser = TrlParser((SDPOConfig, ModelConfig))
    line = """
        --model_name_or_path Qwen/Qwen2.5-Math-1.5B-Instruct --output_dir outputs/sdpo-gsm8k --learning_rate 5e-5
        --dtype bfloat16 --max_completion_length 128 --use_peft
        --lora_target_modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj --per_device_train_batch_size 1
        --gradient_accumulation_steps 2 --num_generations 8 --generation_batch_size 32 --distillation_alpha 1.0
        --distillation_mode sampled_token --distillation_weight 0.5 --report_to none --eval_strategy steps
        --eval_steps 1000 --save_strategy no"""
    config, model = parser.parse_args_and_config(line.split())
    assert config.steps_per_generation == 32 and config.objective.weight == 0.5 and model.use_peft


def test_a_yaml_config_parses_with_trl_and_the_command_line_wins(tmp_path) -> None:
    (tmp_path / "run.yaml").write_text(
        "scale_rewards: false\n"
        "learning_rate: 1e-6\n"
        "distillation_is_clip: null\n"
        "reward_weights: [1.0, 0.5]\n"
        "distillation_mode: topk_logits\n"
        "distillation_topk: 20\n"
        "model_init_kwargs: {dtype: float32}\n"
        "chat_template_kwargs: {enable_thinking: false}\n"
        "num_generations: 4\n"
    )
    parser = TrlParser(SDPOConfig)
    (config,) = parser.parse_args_and_config(["--config", str(tmp_path / "run.yaml"), "--num_generations", "2"])
    assert (config.scale_rewards, config.learning_rate, config.distillation_is_clip) == ("none", 1e-6, None)
    assert (config.reward_weights, config.objective.topk, config.num_generations) == ([1.0, 0.5], 20, 2)
    assert config.model_init_kwargs == {"dtype": "float32"}
    assert config.chat_template_kwargs == {"enable_thinking": False}


# --- views ----------------------------------------------------------------------------------------------------------


def test_the_views_hold_the_fields_and_are_frozen() -> None:
    config = SDPOConfig(distillation_mode="full_logits", distillation_alpha=0.5, teacher_sync_steps=3)
    assert dataclasses.asdict(config.objective) == {
        "loss_type": "dapo", "max_completion_length": 256, "temperature": 1.0, "beta": 0.0, "epsilon": 0.2,
        "epsilon_high": 0.2, "importance_sampling_level": "token", "weight": 1.0, "alpha": 0.5,
        "mode": "full_logits", "topk": None, "is_clip": 2.0, "add_tail": False,
        "sampler_correction": None, "sampler_cap": 2.0,
    }  # fmt: skip
    assert dataclasses.asdict(config.teacher) == {
        "kind": "ema", "update_rate": 0.05, "sync_steps": 3, "dtype": None,
    }  # fmt: skip
    for f in dataclasses.fields(config.reprompt):
        assert getattr(config.reprompt, f.name) == getattr(config, f.name)
    assert config.sampling.generation_kwargs == {} and config.sampling.top_k == 0
    for view in (config.objective, config.teacher, config.reprompt, config.sampling):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(view, dataclasses.fields(view)[0].name, 1)


@pytest.mark.parametrize(("use_vllm", "length_key"), [(False, "max_new_tokens"), (True, "max_tokens")])
def test_generation_kwargs_win_in_the_sampler_and_in_the_objective(use_vllm, length_key) -> None:
    kwargs = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, length_key: 64}
    config = SDPOConfig(use_vllm=use_vllm, vllm_importance_sampling_correction=False, generation_kwargs=kwargs)
    sampling = config.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 20, 0.1)
    assert (sampling.repetition_penalty, sampling.max_completion_length) == (1.1, 64)
    # Log-probs are trained at the temperature that sampled; dr_grpo divides by the length that could be sampled.
    assert (config.objective.temperature, config.objective.max_completion_length) == (0.7, 64)
    assert config.sampling.generation_kwargs == kwargs


# --- presets --------------------------------------------------------------------------------------------------------

PAPER = {
    "weight_decay": 0.01, "max_grad_norm": 1.0, "temperature": 1.0, "max_prompt_length": 2048,
    "max_completion_length": 8192, "chat_template_kwargs": {"enable_thinking": False}, "distillation_weight": 1.0,
    "distillation_mode": "topk_logits", "distillation_add_tail": True, "teacher_model_kind": "ema",
    "success_reward_threshold": 0.5, "remove_thinking_from_demonstration": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_feedback", {
            "distillation_topk": 100, "distillation_alpha": 0.5, "teacher_update_rate": 0.05, "learning_rate": 1e-5,
            "warmup_steps": 10, "lr_scheduler_type": "constant_with_warmup", "num_generations": 8,
            "include_environment_feedback": False, "environment_feedback_only_without_solution": False,
            "generation_batch_size": 256,  # 32 questions * 8
            "gradient_accumulation_steps": 32,  # 32 questions * 8 a step / (8 * 1 process)
            "teacher_sync_steps": 1,  # one step a block
        }),
        ("rich_feedback", {
            "distillation_topk": 20, "distillation_alpha": 1.0, "teacher_update_rate": 0.01, "learning_rate": 1e-6,
            "warmup_steps": 0, "lr_scheduler_type": "constant", "num_generations": 8,
            "include_environment_feedback": True, "environment_feedback_only_without_solution": True,
            "generation_batch_size": 256,  # 32 questions * 8
            "gradient_accumulation_steps": 1,  # 1 question * 8 a step / (8 * 1 process)
            "teacher_sync_steps": 32,  # 256 / 8 steps a block
        }),
        ("test_time", {
            "distillation_topk": 20, "distillation_alpha": 1.0, "teacher_update_rate": 0.01, "learning_rate": 1e-6,
            "warmup_steps": 0, "lr_scheduler_type": "constant", "num_generations": 16,
            "include_environment_feedback": True, "environment_feedback_only_without_solution": True,
            "generation_batch_size": 16,  # 1 question * 16
            "gradient_accumulation_steps": 2,  # 16 a step / (8 * 1 process)
            "teacher_sync_steps": 1,  # one step a block
        }),
    ],
)  # fmt: skip
def test_a_preset_holds_the_papers_values(name, expected) -> None:
    config = SDPOConfig.preset(name)
    expected = {**PAPER, **expected}
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.optim.startswith("adamw")


def test_a_preset_makes_up_the_papers_step_whatever_the_devices(monkeypatch) -> None:
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 4))
    config = SDPOConfig.preset("no_feedback", per_device_train_batch_size=2)
    assert (config.gradient_accumulation_steps, config.steps_per_generation) == (32, 32)  # 256 / (2 * 4)
    config = SDPOConfig.preset("rich_feedback", per_device_train_batch_size=2)
    assert (config.gradient_accumulation_steps, config.teacher_sync_steps) == (1, 32)  # 8 / (2 * 4), 256 / 8
    with pytest.raises(ValueError, match=r"takes 8 completions an optimizer step.*= 32 does not"):
        SDPOConfig.preset("rich_feedback", per_device_train_batch_size=8)


def test_overrides_win_over_a_preset() -> None:
    config = SDPOConfig.preset("no_feedback", output_dir="out", learning_rate=3e-6, gradient_accumulation_steps=4,
                               teacher_sync_steps=7, num_generations=4)  # fmt: skip
    assert (config.output_dir, config.learning_rate, config.gradient_accumulation_steps) == ("out", 3e-6, 4)
    assert (config.teacher_sync_steps, config.generation_batch_size) == (7, 128)  # 32 questions * 4


def test_a_preset_follows_a_smaller_block() -> None:
    config = SDPOConfig.preset(
        "no_feedback", num_generations=2, per_device_train_batch_size=4, generation_batch_size=8
    )
    assert (config.gradient_accumulation_steps, config.teacher_sync_steps) == (2, 1)  # one step of 8 a block
    config = SDPOConfig.preset("rich_feedback", steps_per_generation=4, num_iterations=2)
    assert (config.generation_batch_size, config.teacher_sync_steps) == (32, 8)  # 8 * 4; 4 steps, twice


def test_a_preset_drops_what_an_override_makes_void_and_nothing_you_set() -> None:
    assert SDPOConfig.preset("rich_feedback", teacher_model_kind="live").teacher.kind == "live"
    assert SDPOConfig.preset("no_feedback", distillation_mode="sampled_token").objective.alpha == 1.0
    assert SDPOConfig.preset("no_feedback", distillation_mode="full_logits").objective.alpha == 0.5
    assert not SDPOConfig.preset("rich_feedback", include_environment_feedback=False).include_environment_feedback
    with pytest.raises(ValueError, match=r"teacher_update_rate=0\.2 cannot take effect"):
        SDPOConfig.preset("rich_feedback", teacher_model_kind="live", teacher_update_rate=0.2)


def test_an_unknown_preset_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match=r"'no_feedback', 'rich_feedback', 'test_time'.*Did you mean 'test_time'"):
        SDPOConfig.preset("testtime")


def test_presets_do_not_share_their_dicts() -> None:
    SDPOConfig.preset("no_feedback").chat_template_kwargs["enable_thinking"] = True
    assert SDPOConfig.preset("no_feedback").chat_template_kwargs == {"enable_thinking": False}


# --- documentation --------------------------------------------------------------------------------------------------


def test_the_generated_documentation_is_up_to_date() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == generate_config_docs.render(), "run scripts/generate_config_docs.py"


def test_every_section_begins_with_a_field_and_the_first_field_begins_a_section() -> None:
    assert set(SECTIONS.values()) <= set(own_names())
    assert next(iter(SECTIONS.values())) == own_names()[0]
