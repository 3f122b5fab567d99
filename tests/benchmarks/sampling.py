"""Sampling beside `generate` and transformers' continuous batching, in one run, on the model of bench.py.

    python tests/benchmarks/sampling.py [--repeats 5] [--prompts 2] [--generations 8] [--tokens 64]

CPU seconds on one thread, medians, for prompts of 32 tokens; the ways take turns in one process. With `--ragged` every
completion ends at a length of its own (an end-of-sequence token of probability 4 / tokens), so that rows leave.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from sdpo.generation.transformers import TransformersGenerator


def llama(vocabulary: int) -> LlamaConfig:
    """The model of every benchmark."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def build(vocabulary: int, *, ragged: int) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama(vocabulary)).eval()
    if ragged:  # all logits are near 0, so this many times the mass of one token
        model.lm_head = torch.nn.Linear(256, vocabulary)
        with torch.no_grad():
            model.lm_head.weight.normal_(std=0.02)
            model.lm_head.bias.zero_()
            model.lm_head.bias[1] = torch.log(torch.tensor(4.0 * vocabulary / ragged))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--ragged", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build(options.vocabulary, ragged=options.tokens if options.ragged else 0)
    config = GenerationConfig(
        max_new_tokens=options.tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        bos_token_id=None,
        eos_token_id=[1],
        pad_token_id=0,
    )
    prompts = [[3 + (i * 7 + j) % 1000 for j in range(32)] for i in range(options.prompts)]
    copies = [prompt for prompt in prompts for _ in range(options.generations)]
    own = TransformersGenerator(lambda: model, accelerator=Accelerator(cpu=True), config=config, is_plain=True)

    def plain() -> None:
        ids = torch.tensor(copies)
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)

    def continuous() -> None:
        model.generate_batch(copies, generation_config=config, progress_bar=False)

    ways: dict[str, Callable[[], Any]] = {
        "sdpo": lambda: own.generate(copies),
        "generate": plain,
        "generate_batch": continuous,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # warm
    for _ in range(options.repeats):
        for name, way in ways.items():
            began = time.process_time()
            way()
            seconds[name].append(time.process_time() - began)
    print("| way | CPU, s |\n|---|---|")
    for name, found in seconds.items():
        print(f"| {name} | {statistics.median(found):.2f} |")


if __name__ == "__main__":
    main()
