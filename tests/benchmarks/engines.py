"""Sampling by transformers and by vLLM, on the demo's model, in one run.

    VLLM_CPU_KVCACHE_SPACE=1 .venv-vllm/bin/python tests/benchmarks/engines.py [--repeats 5] [--model FOLDER]
        [--server http://127.0.0.1:8000] [--lora 16]

Wall seconds of a block of `--prompts` questions with `--generations` completions each, medians, in turns; and of one
transfer of the weights. A server (docs/vllm.md says how one is started) is measured where its address is given. On one
machine all share its cores. `--model` is the folder of a model, by default the one `make demo` has converted.
`--lora`: the rank of an adapter on all linear layers, which is sent merged, and to one engine more as it is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
from demo_model import default_cache_dir

from sdpo import SDPOConfig
from sdpo.generation import build_generator

QUESTION = "What is {a} + {b}? Explain how to add two numbers, step by step, in a few sentences."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", default=None)
    parser.add_argument("--server", default=None)
    parser.add_argument("--lora", type=int, default=None)
    options = parser.parse_args()
    folder = options.model or str(default_cache_dir() / "SmolLM2-135M-Instruct")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "max_completion_length": options.tokens,
        "use_cpu": True,
        "bf16": False,
    }
    engine = {"vllm_engine_kwargs": {"enforce_eager": True}, "vllm_max_model_length": 512}
    settings = {
        "transformers": SDPOConfig(**common),
        "vLLM, colocated": SDPOConfig(**common, use_vllm=True, **engine),
    }
    if options.server:
        address = {"vllm_mode": "server", "vllm_server_base_url": options.server}
        settings["vLLM, server"] = SDPOConfig(**common, use_vllm=True, **address)
    if options.lora:
        model = get_peft_model(model, LoraConfig(r=options.lora, target_modules="all-linear")).eval()
        as_it_is = SDPOConfig(**common, use_vllm=True, vllm_lora_as_adapter=True, **engine)
        settings["vLLM, colocated, adapter as it is"] = as_it_is
    accelerator = Accelerator(cpu=True)
    generators = {
        name: build_generator(
            lambda: model,
            accelerator=accelerator,
            processing_class=tokenizer,
            tokenizer=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            sampling=args.sampling,
            engine=args.engine if args.use_vllm else None,
        )
        for name, args in settings.items()
    }
    chats = [[{"role": "user", "content": QUESTION.format(a=11 * i, b=7 * i)}] for i in range(options.prompts)]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    copies = [prompt for prompt in prompts for _ in range(options.generations)]
    drawn: dict[str, list[float]] = {name: [] for name in generators}
    sent: dict[str, list[float]] = {name: [] for name in generators}
    tokens: dict[str, list[int]] = {name: [] for name in generators}
    for number in range(options.repeats + 1):
        for name, generator in generators.items():
            began = time.perf_counter()
            generator.sync(number)
            middle = time.perf_counter()
            completions = generator.generate(copies)
            if number:  # the first warms up
                sent[name].append(middle - began)
                drawn[name].append(time.perf_counter() - middle)
                tokens[name].append(sum(len(completion.ids) for completion in completions))
    print("| sampling by | a block, s | tokens a second | weights, s |\n|---|---|---|---|")
    for name in generators:
        rate = sum(tokens[name]) / sum(drawn[name])
        print(f"| {name} | {statistics.median(drawn[name]):.2f} | {rate:.0f} | {statistics.median(sent[name]):.2f} |")


if __name__ == "__main__":
    main()
