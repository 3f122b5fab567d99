"""Sampling with transformers on a two-layer model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from conftest import make_model
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import set_seed

from sdpo.generation.transformers import TransformersGenerator, _few_rows, draw, generation_config, is_plain_sampling
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
    sampling = SamplingSettings(**{**defaults, **settings})
    config = generation_config(
        sampling,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_ids=[tokenizer.eos_token_id],
    )
    return TransformersGenerator(
        lambda: model, accelerator=Accelerator(cpu=True), config=config, is_plain=is_plain_sampling(sampling)
    )


def test_prompts_of_a_group_are_read_once(tokenizer: Any) -> None:
    model = make_model(tokenizer)
    prompts = [[10, 11, 12, 13]] * 3 + [[20, 21]] * 3 + [[30, 31, 32]] * 2
    read: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: read.append(args[0].numel()))
    for settings in ({}, {"top_p": 0.99}):
        read.clear()
        completions = make_generator(model, tokenizer, **settings).generate(prompts)
        assert read[0] == 3 * 3 and read[1] == 8  # three prompts but their last tokens, then one token a row
        assert len({tuple(c.ids) for c in completions}) > 1


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}])
def test_completions_are_those_of_generate_where_nothing_is_left_to_chance(tokenizer: Any, settings: Any) -> None:
    """At a temperature near 0 the likeliest token is drawn; rows end at different lengths and leave the batch."""
    model = make_model(tokenizer)
    model.generation_config.eos_token_id = ends = list(range(0, len(tokenizer), 7))
    prompts = [[10 + i, 11, 12 + i][: 1 + i % 3] for i in range(12) for _ in range(2)]
    generator = make_generator(model, tokenizer, temperature=1e-4, max_completion_length=12, **settings)
    generator.eos_token_ids = frozenset(ends)
    generator.config.eos_token_id = ends
    completions = generator.generate(prompts)
    for prompt, completion in zip(prompts, completions, strict=True):
        whole = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=ends, pad_token_id=0
        )
        assert completion.ids == whole[0, len(prompt) :].tolist()
    assert len({len(c.ids) for c in completions}) > 2


def test_a_draw_follows_any_distribution() -> None:
    """Masses 0.5, 0.25, 0.25 in three blocks, zeros elsewhere: chi-square with 2 degrees of freedom below 13.8."""
    logits = torch.full((6000, 700), -torch.inf)
    logits[:, 3], logits[:, 400], logits[:, 699] = torch.tensor([0.5, 0.25, 0.25]).log()
    set_seed(0)
    counts = torch.bincount(draw(logits), minlength=700)
    assert counts.sum() == counts[[3, 400, 699]].sum() == 6000
    expected = torch.tensor([3000.0, 1500.0, 1500.0])
    assert ((counts[[3, 400, 699]] - expected).square() / expected).sum() < 13.8


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


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_prompt_learning_is_sampled_as_it_is_trained(tokenizer: Any, kind: Any) -> None:
    """At a temperature near 0, each token is the likeliest under the forward on the sequence before it."""
    model = get_peft_model(make_model(tokenizer), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    prompts = [[10, 11, 12], [20]]
    for prompt, completion in zip(
        prompts, make_generator(model, tokenizer, temperature=1e-4).generate(prompts), strict=True
    ):
        sequence = list(prompt)
        for token in completion.ids:
            with torch.no_grad():
                assert token == model(input_ids=torch.tensor([sequence])).logits[0, -1].argmax().item()
            sequence.append(token)
    with pytest.raises(ValueError, match=r"top_p=1\.0"):
        make_generator(model, tokenizer, top_p=0.5).generate(prompts)


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_are_multiplied_as_by_the_head_itself(monkeypatch: Any, capability: str, has_bias: bool) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    head = torch.nn.Linear(8, 50, bias=has_bias)
    for number in (1, 3, 4, 8, 9, 15, 16, 17):
        hidden = torch.randn(number, 1, 8)
        expected = head(hidden)
        with _few_rows(head), torch.no_grad():
            assert "forward" in vars(head)
            assert torch.allclose(head(hidden), expected, atol=1e-6) and head(hidden).shape == (number, 1, 50)
        assert "forward" not in vars(head)
