"""Text and metadata of a card, from facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from sdpo import SDPOConfig
from sdpo.config import SECTIONS
from sdpo.metric_table import METRICS
from sdpo.model_card import (
    HIDDEN_SECTIONS,
    MAX_SHOWN,
    PAPER_CITATION,
    SHOWN_METRICS,
    SHOWN_SECTIONS,
    CardFacts,
    Result,
    Setting,
    changed_settings,
    eval_results,
    hub_id,
    model_card,
    shown,
    train_results,
)

FACTS = CardFacts(
    title="mine",
    repo="tester/mine",
    base_model="acme/tiny-1",
    architecture="Qwen2ForCausalLM",
    adapter=None,
    is_chat=True,
    chat_template_kwargs={},
    max_new_tokens=8,
    trust_remote_code=False,
    dataset="a dataset of 3 prompts",
    datasets=[],
    tags=["sdpo"],
    language=None,
    license=None,
    pipeline_tag="text-generation",
    weight=1.0,
    sources=["an attempt that succeeded"],
    settings=[],
    rewards={"exact": 1.0},
    step=7,
    num_completions=64,
    num_generations=8,
    temperature=1.0,
    best=None,
    train_results=[],
    eval_results=[],
    versions={"sdpo": "0.1.0"},
)


def config(**settings: Any) -> SDPOConfig:
    return SDPOConfig(output_dir="/home/somebody/outputs", use_cpu=True, **settings)


def names_of(**settings: Any) -> set[str]:
    return {setting.name for setting in changed_settings(config(**settings))}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("gpt2", "gpt2"),
        ("/home/somebody/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/0123abcd", "Qwen/Qwen3-0.6B"),
        ("/home/somebody/hub/models--acme--a--b/snapshots/0123abcd/", None),  # "--" is in no id
        ("/home/somebody/models/mine", None),
        ("./mine", None),
        ("outputs/first/checkpoint-7", None),
        ("C:\\models\\mine", None),
        ("", None),
    ],
)
def test_what_is_an_id_on_the_hub(name: str, expected: str | None) -> None:
    assert hub_id(name) == expected


def test_settings_are_shown_that_are_not_the_defaults() -> None:
    assert names_of() == set()
    assert changed_settings(config(learning_rate=1e-5)) == [Setting("learning_rate", "1e-05", "5e-05")]
    assert names_of(lr_scheduler_type="linear", optim="adamw_torch_fused") == set()  # the defaults, as text
    assert changed_settings(config(lr_scheduler_type="constant")) == [
        Setting("lr_scheduler_type", "'constant'", "'linear'")
    ]
    # What follows from other settings is not one: a block of 4 accumulated microbatches of 8.
    assert names_of(gradient_accumulation_steps=4) == {"gradient_accumulation_steps"}
    assert names_of(generation_batch_size=32) == {"generation_batch_size"}


def test_settings_that_may_name_a_machine_are_not_shown() -> None:
    assert names_of(run_name="somebody's run", logging_steps=1, report_to="none", save_steps=3) == set()
    assert names_of(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://10.0.0.1:8000") == {
        "use_vllm",
        "vllm_mode",
    }
    assert names_of(model_init_kwargs={"cache_dir": "/home/somebody/cache"}) == set()


def test_every_section_of_the_settings_is_shown_or_hidden() -> None:
    assert sorted([*SHOWN_SECTIONS, *HIDDEN_SECTIONS]) == sorted(SECTIONS)


def test_a_value_is_shown_without_paths_and_not_at_any_length() -> None:
    assert shown({"stop": ["</s>", "/no_think"], "file": "/home/somebody/x.txt"}) == (
        "{'stop': ['</s>', '/no_think'], 'file': '...'}"
    )
    assert shown("x" * 1000) == "'" + "x" * (MAX_SHOWN - 1) + "..."
    assert shown(("a", "~/x/y")) == "('a', '...')"


def test_values_stand_in_their_cells_whatever_is_in_them() -> None:
    setting = Setting("reprompt_template", repr("{prompt} | ```\n`"), "''")
    [row] = [line for line in model_card(replace(FACTS, settings=[setting])).text.splitlines() if "reprompt" in line]
    assert row == "| `reprompt_template` | ```` '{prompt} \\| ```\\n`' ```` | `''` |"


def test_shown_metrics_exist() -> None:
    assert set(SHOWN_METRICS) <= {metric.name for section in METRICS for metric in section.metrics}


HISTORY = [
    {"loss": 1.0, "reward": 0.1, "rewards/exact/mean": 0.1, "step": 10},
    {"eval_loss": 0.5, "eval_reward": 0.2, "eval_runtime": 3.0, "step": 10},
    {"loss": 1.0, "reward": 0.3, "rewards/exact/mean": 0.4, "completions/mean_length": 5, "entropy": 1.0, "step": 20},
    {"eval_hard_reward": 0.1, "eval_hard_loss": 0.5, "eval_hard_self_distillation/policy_loss": 0.5, "step": 20},
    {"eval_easy_reward": 0.9, "eval_easy_rewards/exact/mean": 0.8, "step": 20},
    {"train_loss": 1.0, "train_runtime": 9.0, "step": 20},
]


def values(results: list[Result]) -> dict[str, float]:
    return {result.name: result.value for result in results}


def test_results_are_the_last_ones_or_those_of_a_step() -> None:
    last = {"reward": 0.3, "rewards/exact/mean": 0.4, "completions/mean_length": 5}
    assert values(train_results(HISTORY)) == last
    assert values(train_results(HISTORY, until=10)) == {"reward": 0.1, "rewards/exact/mean": 0.1}
    assert values(eval_results(HISTORY)) == {
        "eval_hard_reward": 0.1,
        "eval_easy_reward": 0.9,
        "eval_easy_rewards/exact/mean": 0.8,
        "eval_hard_loss": 0.5,
    }
    assert values(eval_results(HISTORY, at=10)) == {"eval_reward": 0.2, "eval_loss": 0.5}
    assert train_results([]) == eval_results([]) == train_results([{"loss": 1.0, "reward": None}]) == []


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({}, "[acme/tiny-1](https://huggingface.co/acme/tiny-1), trained on a dataset of 3 prompts by self-dist"),
        ({"adapter": "lora"}, "LoRA adapter of [acme/tiny-1](https://huggingface.co/acme/tiny-1), trained on"),
        ({"base_model": None}, "`Qwen2ForCausalLM` trained from a model that is not on the hub on a dataset of"),
        ({"base_model": None, "adapter": "lora"}, "LoRA adapter of a model that is not on the hub, trained on"),
        ({"weight": 0.0}, "by a policy gradient alone"),
        ({"sources": ["a", "b", "c"]}, "a teacher that was shown a, b or c"),
        ({"rewards": {"a": 1.0, "b": 0.5}}, "The reward came from `a`, `b` (weight 0.5)."),
        ({"rewards": {}}, "There was no reward function."),
        ({"best": (3, "eval_reward")}, "The weights are those of step 3, the best by `eval_reward`."),
    ],
)
def test_what_a_card_says(facts: dict[str, Any], sentence: str) -> None:
    assert sentence in model_card(replace(FACTS, **facts)).text


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({"enable_thinking": False, "note": 'a "b"'}, ["    enable_thinking=False,", "    note='a \"b\"',"]),
        ({"not a word": 1, "class": 2, "thing": object(), "file": "/home/somebody/x"}, []),
    ],
)
def test_arguments_of_the_chat_template_are_python(values: dict[str, Any], lines: list[str]) -> None:
    text = model_card(replace(FACTS, chat_template_kwargs=values)).text
    compile(text.split("```python\n")[1].split("```")[0], "card", "exec")
    between = text.split('    return_tensors="pt",\n')[1].split(")\n")[0]
    assert between.splitlines() == lines


def test_a_card_survives_its_file(tmp_path: Path) -> None:
    card = model_card(replace(FACTS, license="mit", datasets=["a/b"], adapter="lora", tags=["sdpo", "sdpo", "x"]))
    card.save(tmp_path / "README.md")
    again = ModelCard.load(tmp_path / "README.md")
    assert again.data.to_dict() == card.data.to_dict()
    assert again.data.tags == ["sdpo", "x", "lora"]


def test_the_citation_is_that_of_the_readme() -> None:
    assert PAPER_CITATION in (Path(__file__).parent.parent / "README.md").read_text()
    assert PAPER_CITATION in model_card(FACTS).text
