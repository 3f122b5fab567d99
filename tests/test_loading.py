"""The policy from whatever the user passed, and what is refused before it is loaded."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from conftest import make_model
from torch import nn

from sdpo import SDPOConfig, SDPOTrainer
from sdpo.loading import check_launch, load_policy, load_processing_class, model_loading_kwargs, zero_dropout

IDS = torch.arange(1, 25).view(2, 12)
SMALL = {"vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}


@pytest.fixture
def folder(tokenizer: Any, tmp_path: Path) -> Path:
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# --- what a model may be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [5, object(), None, ["a"], nn.Linear(2, 2)])
def test_a_model_of_another_kind_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=f"model must be a path, .* got {type(model).__name__}"):
        load_policy(model, SDPOConfig(), peft_config=None)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_may_be_text_or_a_path(folder: Path, kind: Any) -> None:
    policy = load_policy(kind(folder), SDPOConfig(), peft_config=None)
    assert policy.dtype == torch.float32
    assert load_processing_class(policy, SDPOConfig()).eos_token == "<eos>"


def test_a_peft_model_stays_as_it_is(model: Any) -> None:
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert load_policy(adapted, SDPOConfig(), peft_config=None) is adapted


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_a_dtype_is_taken_by_name_or_as_it_is_and_the_callers_dict_stays(folder: Path, dtype: Any) -> None:
    given = {"dtype": dtype, "attn_implementation": "eager"}
    before = copy.deepcopy(given)
    args = SDPOConfig(model_init_kwargs=given)
    policy = load_policy(str(folder), args, peft_config=None)
    model_loading_kwargs(args)["dtype"] = None
    load_processing_class(policy, args)
    assert policy.dtype == torch.bfloat16 and policy.config._attn_implementation == "eager"
    assert given == before == args.model_init_kwargs


def test_what_is_done_to_the_keywords_for_loading_stays_with_them() -> None:
    args = SDPOConfig(model_init_kwargs={"quantization_config": {"bits": 4}})
    model_loading_kwargs(args)["quantization_config"].clear()
    assert args.model_init_kwargs == {"quantization_config": {"bits": 4}}


def test_keywords_for_loading_do_not_go_with_a_loaded_model(model: Any) -> None:
    with pytest.raises(ValueError, match="cannot act on a model that is already loaded"):
        load_policy(model, SDPOConfig(model_init_kwargs={"dtype": "float32"}), peft_config=None)


# --- dropout ---------------------------------------------------------------------------------------------------------

QWEN = transformers.Qwen2Config(**SMALL, num_key_value_heads=1, intermediate_size=32, attention_dropout=0.5)
OPT = transformers.OPTConfig(
    **SMALL, ffn_dim=32, word_embed_proj_dim=16, max_position_embeddings=32, dropout=0.5, attention_dropout=0.5,
    layerdrop=0.5,
)  # fmt: skip
GPT2 = transformers.GPT2Config(**SMALL, n_positions=32, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
FALCON = transformers.FalconConfig(**SMALL, hidden_dropout=0.5, attention_dropout=0.5)  # its forward reads the config
LORA = peft.LoraConfig(lora_dropout=0.5, target_modules=["q_proj"], init_lora_weights=False)
LOHA = peft.LoHaConfig(rank_dropout=0.5, module_dropout=0.5, target_modules=["q_proj"], init_weights=False)


def two_forwards(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    model.train()
    with torch.no_grad():
        return model(input_ids=IDS).logits, model(input_ids=IDS).logits


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("config", "adapter"),
    [(QWEN, None), (OPT, None), (GPT2, None), (FALCON, None), (QWEN, LORA), (QWEN, LOHA)],
    ids=["qwen2", "opt", "gpt2", "falcon", "lora", "loha"],
)
def test_without_dropout_two_forwards_in_training_are_equal(config: Any, adapter: Any, attention: str) -> None:
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if adapter is not None:
        model = peft.get_peft_model(model, copy.deepcopy(adapter))
    one, other = two_forwards(model)
    assert not torch.equal(one, other)
    zero_dropout(model)
    one, other = two_forwards(model)
    assert torch.equal(one, other)


def test_the_saved_config_keeps_the_rates_that_no_forward_reads() -> None:
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(QWEN))
    zero_dropout(model)
    assert model.config.attention_dropout == 0.5


@pytest.mark.parametrize("is_disabled", [True, False])
def test_dropout_is_disabled_on_request_also_in_a_new_adapter(is_disabled: bool) -> None:
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(QWEN))
    args = SDPOConfig(disable_dropout=is_disabled)
    one, other = two_forwards(load_policy(model, args, peft_config=copy.deepcopy(LORA)))
    assert torch.equal(one, other) is is_disabled


# --- before anything is loaded ---------------------------------------------------------------------------------------


def test_vllm_is_asked_for_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'sdpo\[vllm\]'"):
        SDPOTrainer("no such model", lambda **_: [], SDPOConfig(use_vllm=True))


def test_a_batch_size_that_changes_during_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="auto_find_batch_size=True would change"):
        check_launch(SDPOConfig(auto_find_batch_size=True))


def test_teacher_prompts_leave_room_for_the_completion_within_the_models_positions(tokenizer: Any) -> None:
    from sdpo.loading import reprompt_settings

    config = SDPOConfig(output_dir="x", max_completion_length=100)
    model = make_model(tokenizer)  # 512 positions
    assert reprompt_settings(model, config).max_reprompt_len == 412
    assert reprompt_settings(model, replace(config, max_reprompt_len=50)).max_reprompt_len == 50


def test_the_older_name_of_dtype_acts(tokenizer: Any, tmp_path: Any) -> None:
    make_model(tokenizer).save_pretrained(tmp_path)
    config = SDPOConfig(output_dir="x", model_init_kwargs={"torch_dtype": "bfloat16"})
    assert load_policy(str(tmp_path), config, peft_config=None).dtype == torch.bfloat16
    assert load_policy(str(tmp_path), SDPOConfig(output_dir="x"), peft_config=None).dtype == torch.float32
