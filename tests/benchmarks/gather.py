"""What the ranks send each other about a block of completions, and how long that takes; in one run.

    python -m torch.distributed.run --standalone --nproc_per_node 2 tests/benchmarks/gather.py \
        [--prompts 64] [--generations 8] [--tokens 1024] [--repeats 5]

Rows as they are, with prompts, ids and texts, against what `sdpo.reprompt.for_other_ranks` leaves of them: for groups
that lie within a rank, and for groups that lie across ranks (their successes' texts go with them; half of the rows
are successes). Bytes of one rank's share, and seconds of the whole exchange, median of the repeats.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time

from accelerate import Accelerator

from sdpo import SDPOConfig
from sdpo.demonstrations import for_other_ranks
from sdpo.distributed import gather_rows, wait
from sdpo.types import Completion, Rollout, ScoredRollout


def rows_of(first: int, number: int, *, generations: int, tokens: int) -> list[ScoredRollout]:
    """Rows with prompts of 256 tokens, every other one a success, every other one with feedback."""
    found = []
    for i in range(first, first + number):
        ids = [(7919 * i + 31 * t) % 150_000 for t in range(tokens)]
        text = " ".join(f"tok{t % 997}" for t in ids)
        completion = Completion(ids, is_truncated=False)
        rollout = Rollout(i // generations, [{"role": "user", "content": text[:1200]}], ids[:256], completion, text)
        is_right = i % 2 == 0
        feedback = None if is_right else "The result is wrong. " * 10
        found.append(ScoredRollout(rollout, {"reward": float(is_right)}, float(is_right), feedback))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    settings = SDPOConfig(output_dir="unused", use_cpu=True, ddp_backend="gloo", bf16=False).reprompt
    accelerator = Accelerator(cpu=True)
    number = options.prompts * options.generations // accelerator.num_processes
    rows = rows_of(accelerator.process_index * number, number, generations=options.generations, tokens=options.tokens)
    sent = {
        "rows as they are": rows,
        "groups within a rank": for_other_ranks(rows, settings, num_generations=options.generations),
        "groups across ranks": for_other_ranks(rows, settings, num_generations=10**9),
    }
    for name, share in sent.items():
        seconds = []
        for _ in range(options.repeats):
            wait(accelerator)
            start = time.perf_counter()
            gather_rows(share, accelerator)
            seconds.append(time.perf_counter() - start)
        accelerator.print(
            f"{name:<24} {len(pickle.dumps(share)):>12,} bytes a rank   {statistics.median(seconds):.4f} s", flush=True
        )


if __name__ == "__main__":
    main()
