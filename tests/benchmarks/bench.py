"""Time and memory of a step, beside `trl.experimental.sdpo`, in one run.

    python tests/benchmarks/bench.py [--repeats 5] [--cases bigvocab-topk ...] [--scaling | --options]

Each measurement is a process of its own; the two libraries take turns, with the same model, seed, prompts and
completion lengths. Times are CPU seconds a step on one thread, medians over the repeats. Memory is the peak over the
built trainer and the optimizer's state, which no step can do without; "over built" counts that state too. `--scaling`
varies tokens, vocabulary and the share of active rows, and `--options` precision, checkpointing and compilation, for
this library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "small-sampled": {"vocabulary": 32_000, "mode": "sampled_token"},
    "small-full": {"vocabulary": 32_000, "mode": "full_logits"},
    "bigvocab-sampled": {"vocabulary": 152_000, "mode": "sampled_token"},
    "bigvocab-topk": {"vocabulary": 152_000, "mode": "topk_logits"},
    "bigvocab-full": {"vocabulary": 152_000, "mode": "full_logits"},
    "small-sampled-half": {"vocabulary": 32_000, "mode": "sampled_token", "active": 0.5},
}
# Share of ours in the other's, at most.
TARGETS = {
    "bigvocab-topk": {"rest": 0.35, "memory": 0.22, "step": 0.50},
    "bigvocab-full": {"rest": 0.55, "memory": 0.15, "step": 0.55},
    "bigvocab-sampled": {"rest": 0.70, "memory": 0.30},
    "small-sampled": {"step": 0.75},
    "small-sampled-half": {"rest": 0.45},
}
SCALING = [
    *({"vocabulary": 152_000, "mode": "full_logits", "tokens": tokens} for tokens in (64, 256, 1024)),
    *({"vocabulary": vocabulary, "mode": "full_logits"} for vocabulary in (32_000, 152_000, 256_000)),
    *({"vocabulary": 32_000, "mode": "sampled_token", "active": active} for active in (0.25, 0.5, 1.0)),
]
OPTIONS = [
    {"vocabulary": 32_000, "mode": "sampled_token", "options": options}
    for options in ({}, {"bf16": True}, {"gradient_checkpointing": True}, {"torch_compile": True})
]
STEPS = 4


def rss() -> float:
    """Memory of this process, MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak_rss() -> float:
    """Highest memory of this process since the peak was reset, MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def worker(package: str, case: dict[str, Any]) -> dict[str, float]:
    """CPU seconds a step, in sampling and in the rest, and peak memory over the built trainer, of one run."""
    import importlib

    import torch
    from datasets import Dataset
    from sampling import llama
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    torch.set_num_threads(1)
    tokens, vocabulary = case.get("tokens", 64), case["vocabulary"]
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, vocabulary)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    config = llama(vocabulary)
    module = importlib.import_module(package)
    active = case.get("active", 1.0)

    def reward(completions: list[str], **_: Any) -> list[float]:
        # Of two groups of four, the active share has a success; each row of such a group is shown one (two succeed).
        groups = [completions[i : i + 4] for i in range(0, len(completions), 4)]
        return [
            float(i < 2 and g < round(active * len(groups)))
            for g, group in enumerate(groups)
            for i in range(len(group))
        ]

    folder = tempfile.mkdtemp()
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    args = module.SDPOConfig(
        **{"gradient_checkpointing": False, "bf16": False, **case.get("options", {})},
        output_dir=folder,
        per_device_train_batch_size=16 if active < 1 else 8,
        num_generations=4,
        max_completion_length=tokens,
        max_steps=STEPS,
        distillation_mode=case["mode"],
        distillation_topk=100 if case["mode"] == "topk_logits" else None,
        distillation_alpha=1.0,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        seed=0,
    )
    prompts = [" ".join(f"w{3 + (i * 7 + j) % 1000}" for j in range(32)) for i in range(8)]
    trainer = module.SDPOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
    del model
    sampling = 0.0
    owner, name = (trainer.generator, "generate") if package == "sdpo" else (trainer, "_generate")
    generate = getattr(owner, name)

    def timed(*values: Any, **named: Any) -> Any:
        nonlocal sampling
        began = time.process_time()
        result = generate(*values, **named)
        sampling += time.process_time() - began
        return result

    setattr(owner, name, timed)
    marks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((time.process_time(), sampling))

    trainer.add_callback(Clock())
    built = rss()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    trainer.train()
    number = len(marks) - 1
    whole = (marks[-1][0] - marks[0][0]) / number
    drawn = (marks[-1][1] - marks[0][1]) / number
    over_built = peak_rss() - built
    moments = [value for state in trainer.optimizer.state.values() for value in state.values() if value.ndim]
    return {
        "step": whole,
        "sampling": drawn,
        "rest": whole - drawn,
        "memory": over_built - sum(value.nbytes for value in moments) / 1e6,
        "over built": over_built,
    }


def measure(package: str, case: dict[str, Any]) -> dict[str, float]:
    """`worker` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, __file__, "--worker", package, json.dumps(case)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600)
    if result.returncode:
        raise RuntimeError(result.stderr[-2000:])
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def compare(names: list[str], repeats: int) -> None:
    print("| case | figure | peer | sdpo | ratio | at most |\n|---|---|---|---|---|---|")
    for name in names:
        runs: dict[str, list[dict[str, float]]] = {"trl.experimental.sdpo": [], "sdpo": []}
        for _ in range(repeats):
            for package, found in runs.items():
                found.append(measure(package, CASES[name]))
        peer, ours = (medians(found) for found in runs.values())
        for figure in ("step", "sampling", "rest", "memory", "over built"):
            limit = TARGETS.get(name, {}).get(figure, "")
            unit = "MB" if figure in ("memory", "over built") else "s"
            ratio = ours[figure] / peer[figure]
            print(
                f"| {name} | {figure}, {unit} | {peer[figure]:.2f} | {ours[figure]:.2f} | {ratio:.2f} | {limit} |",
                flush=True,
            )


def vary(cases: list[dict[str, Any]], repeats: int) -> None:
    print("| vocabulary | mode | tokens | active | options | rest, s | memory, MB |\n|---|---|---|---|---|---|---|")
    for case in cases:
        found = medians([measure("sdpo", case) for _ in range(repeats)])
        options = ", ".join(case.get("options", {})) or "none"
        shown = (case["vocabulary"], case["mode"], case.get("tokens", 64), case.get("active", 1.0), options)
        print(f"| {' | '.join(map(str, shown))} | {found['rest']:.2f} | {found['memory']:.0f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--options", action="store_true")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker[0], json.loads(options.worker[1]))))
    elif options.scaling or options.options:
        vary(SCALING if options.scaling else OPTIONS, options.repeats)
    else:
        compare(options.cases, options.repeats)
