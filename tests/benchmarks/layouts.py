"""What sharing prompts within a group, or sorting rows by length, spares a training step; in one run.

    python tests/benchmarks/layouts.py [--repeats 3] [--prompt 64] [--shortest 16] [--longest 256]

A block of 4 groups of 8 completions with lengths drawn evenly between the two, cut into microbatches of 8: groups
with a shared prompt (as the trainer lays them out where that is cheaper), rows apart, and rows apart after sorting the
block by length. CPU seconds of forward and backward of student and teacher over the block on one thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from sampling import build

sys.path.insert(0, str(Path(__file__).parent.parent))
import plain

from sdpo import forward
from sdpo.collate import pad, sequences
from sdpo.heads import find_head
from sdpo.losses.objective import objective
from sdpo.types import TrainingBatch

GROUPS, SIZE = 4, 8


def batch_of(rows: list[int], prompts: list[list[int]], answers: list[list[int]], *, share: bool) -> TrainingBatch:
    number = range(len(rows))
    own = [prompts[row] for row in rows]
    taught = [[*prompt, *answers[rows[0]]] for prompt in own]  # a demonstration: one for the whole microbatch
    completions = [answers[row] for row in rows]
    mask = pad([[1] * len(ids) for ids in completions], 0, dtype=torch.bool)
    layout = {"pad_token_id": 0, "token_cost": 6.0 * 256 if share else None}
    return TrainingBatch(
        student=sequences(own, completions, number, **layout),
        teacher=sequences(taught, completions, number, **layout),
        completion_ids=pad(completions, 0, dtype=torch.long),
        completion_mask=mask,
        policy_mask=mask,
        distillation_mask=mask,
        advantages=torch.zeros(len(rows)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=16)
    parser.add_argument("--longest", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, draw = build(32_000, ragged=0), random.Random(0)
    teacher, settings = build(32_000, ragged=0), replace(plain.SETTINGS, mode="sampled_token")
    prompts, answers = [], []
    for group in range(GROUPS):
        prompts += [[3 + (group * 7 + j) % 1000 for j in range(options.prompt)]] * SIZE
        lengths = [draw.randint(options.shortest, options.longest) for _ in range(SIZE)]
        answers += [[draw.randint(3, 31_999) for _ in range(length)] for length in lengths]
    order = list(range(GROUPS * SIZE))
    by_length = sorted(order, key=lambda row: len(answers[row]))
    ways = {"shared": (order, True), "apart": (order, False), "sorted": (by_length, False)}

    def step(rows: list[int], share: bool) -> float:
        began = time.process_time()
        for start in range(0, len(rows), SIZE):
            batch = batch_of(rows[start : start + SIZE], prompts, answers, share=share)
            found, _ = forward.token_loss(
                model,
                find_head(model),
                batch,
                settings,
                lambda terms, batch=batch: objective(terms, batch, settings),
                teacher=[(teacher, 1.0)],
            )
            found.loss.backward()
        return time.process_time() - began

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, (rows, share) in ways.items():
            seconds[name].append(step(rows, share))
    print("| layout | CPU, s |\n|---|---|")
    for name, found in seconds.items():
        print(f"| {name} | {statistics.median(found):.2f} |")


if __name__ == "__main__":
    main()
