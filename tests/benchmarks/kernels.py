"""Head and loss alone: this library's chunks beside whole logits and the kernels of `trl.kernels`, in one run.

    python tests/benchmarks/kernels.py [--repeats 5] [--tokens 512 2048 8192] [--vocabulary 152000]

Each measurement is a process of its own, in turns. CPU seconds of forward and backward on one thread, and peak memory
over inputs and gradients, medians. "logps" is the log-prob of a token; the others are distillation modes, alpha 1.
`trl.kernels` has no sampled-token divergence: its log-probs of student and teacher are put together here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

HIDDEN = 256
WAYS = ("whole", "trl", "sdpo")
CASES = ("logps", "sampled_token", "full_logits", "topk_logits")


def worker(way: str, case: str, tokens: int, vocabulary: int) -> dict[str, float]:
    """CPU seconds and MB of one forward and backward."""
    import torch
    from bench import peak_rss, rss
    from torch import nn
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    sys.path.insert(0, str(Path(__file__).parent.parent))
    import plain

    from sdpo.chunk import Taught
    from sdpo.heads import Head
    from sdpo.token_values import token_values

    torch.set_num_threads(1)
    torch.manual_seed(0)
    head, other = (nn.Linear(HIDDEN, vocabulary, bias=False) for _ in range(2))
    hidden = torch.randn(tokens, HIDDEN).requires_grad_()
    states = torch.randn(tokens, HIDDEN)
    ids = torch.randint(0, vocabulary, (tokens,))
    other.requires_grad_(False)
    topk = 100 if case == "topk_logits" else None
    settings = replace(plain.SETTINGS, mode="sampled_token" if case == "logps" else case, topk=topk)
    is_taught = case != "logps"

    def whole() -> torch.Tensor:
        student = head(hidden).log_softmax(-1)
        chosen = student.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        if not is_taught:
            return chosen.sum()
        teacher = other(states).log_softmax(-1)
        if case == "sampled_token":
            gap = (chosen - teacher.gather(-1, ids.unsqueeze(-1)).squeeze(-1)).detach()
            return (gap * chosen).sum()
        if topk is not None:
            support = student.detach().topk(topk, -1).indices
            student, teacher = (x.gather(-1, support).log_softmax(-1) for x in (student, teacher))
        return (student.exp() * (student - teacher)).sum()

    def trl() -> torch.Tensor | None:
        def logps(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return ChunkedLogProbFunction.apply(x, weight, None, ids, 1.0, 32_768, None, 1.0, ("entropy",))[0]

        if case == "topk_logits":
            return None
        if case == "full_logits":
            weights = (hidden, head.weight, None, states, other.weight, None)
            return ChunkedDivergenceFunction.apply(*weights, 1.0)[0].sum()
        mine = logps(hidden, head.weight)
        return ((mine - logps(states, other.weight)).detach() * mine).sum() if is_taught else mine.sum()

    def sdpo() -> torch.Tensor:
        ones = torch.ones(tokens)
        taught = [Taught(Head(other), 1.0, states)] if is_taught else []

        def slopes(rows: slice, _: object) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            return (None, ones[rows]) if is_taught else (ones[rows], None)

        return token_values(Head(head), hidden, ids, taught, settings, slopes=slopes)[1]

    ways = {"whole": whole, "trl": trl, "sdpo": sdpo}
    head.weight.grad = torch.zeros_like(head.weight)  # its memory is not the loss's own
    held = rss()
    Path("/proc/self/clear_refs").write_text("5")
    began = time.process_time()
    loss = ways[way]()
    if loss is None:
        return {}
    loss.backward()
    return {"seconds": time.process_time() - began, "memory": peak_rss() - held}


def measure(*arguments: object) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise RuntimeError(result.stderr[-2000:])
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", nargs="*", type=int, default=[512])
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        way, case, tokens, vocabulary = options.worker
        print(json.dumps(worker(way, case, int(tokens), int(vocabulary))))
        sys.exit()
    print("| case | tokens | way | CPU, s | memory, MB |\n|---|---|---|---|---|")
    for tokens in options.tokens:
        for case in CASES:
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
            for _ in range(options.repeats):
                for way, found in runs.items():
                    found.append(measure(way, case, tokens, options.vocabulary))
            for way, found in runs.items():
                if all(found):
                    seconds, memory = (statistics.median(run[name] for run in found) for name in ("seconds", "memory"))
                    print(f"| {case} | {tokens} | {way} | {seconds:.2f} | {memory:.0f} |", flush=True)
