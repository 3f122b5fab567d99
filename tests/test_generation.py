"""Sampling with transformers on a two-layer model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from conftest import make_model
from transformers import set_seed

from sdpo.generation.transformers import TransformersGenerator, generation_config
from sdpo.types import SamplingSettings


def make_generator(model: Any, tokenizer: Any, **settings: Any) -> TransformersGenerator:
    defaults: dict[str, Any] = {
        "max_completion_length": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "cache_implementation": None,
        "generation_kwargs": {},
    }
    config = generation_config(
        SamplingSettings(**{**defaults, **settings}),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_ids=[tokenizer.eos_token_id],
    )
    return TransformersGenerator(lambda: model, accelerator=Accelerator(cpu=True), config=config)


def test_prompts_of_a_group_are_read_once_with_the_same_completions(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tokenizer)
    prompts = [[10, 11, 12, 13]] * 3 + [[20, 21]] * 3 + [[30, 31, 32]] * 2
    read: list[int] = []
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda _, args, __: read.append(args[0].numel()))
    generator = make_generator(model, tokenizer)
    set_seed(0)
    shared = generator.generate(prompts)
    assert read[0] == 3 * 3 and read[1] == 8  # three prompts but their last tokens, then one token a row
    monkeypatch.setattr(TransformersGenerator, "_shared_prefill", lambda *_: {})
    set_seed(0)
    assert generator.generate(prompts) == shared
    assert len({tuple(c.ids) for c in shared}) > 1


def test_sampled_tokens_follow_the_models_distribution(tokenizer: Any) -> None:
    """First token of 4,000 completions of one prompt: chi-square against the softmax, at temperature 0.7."""
    model = make_model(tokenizer)
    generator = make_generator(model, tokenizer, max_completion_length=1, temperature=0.7)
    set_seed(0)
    number = 4000
    counts = torch.zeros(len(tokenizer))
    for completion in generator.generate([[10, 11, 12]] * number):
        counts[completion.ids[0]] += 1
    logits = model(torch.tensor([[10, 11, 12]])).logits[0, -1].detach() / 0.7
    expected = logits.softmax(-1) * number
    common = expected >= 5
    statistic = ((counts - expected)[common].square() / expected[common]).sum().item()
    degrees = int(common.sum()) - 1
    # mean of the statistic is the degrees of freedom, its standard deviation sqrt(2 degrees): 4 of them is 1 in 10^4
    assert abs(statistic - degrees) < 4 * (2 * degrees) ** 0.5


def test_a_completion_without_end_token_is_truncated(tokenizer: Any) -> None:
    model = make_model(tokenizer)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = 0.0
    completions = make_generator(model, tokenizer, generation_kwargs={"suppress_tokens": [1]}).generate([[10]] * 4)
    assert all(c.is_truncated and len(c.ids) == 6 for c in completions)
