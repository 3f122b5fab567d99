"""Accumulators of what is logged. A mean keeps its numerator and denominator, so a mean of means never appears."""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch

from sdpo.types import LossTerms, Row, ScoredRollout, TeacherContext, TokenTerms, TrainingBatch

Number = float | torch.Tensor

# Where the bins of a histogram begin and end: symmetric, from 1e-4 to 100 nats in steps of 5 %, one bin around 0.
_SIZES = [1e-4 * 1.05**i for i in range(284)]
EDGES = [*(-size for size in reversed(_SIZES)), *_SIZES]
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NEAR_ZERO = 0.1  # nats: teacher and student agree on the token's probability within about 10 %


def _float(value: Number) -> float:
    return value.item() if isinstance(value, torch.Tensor) else float(value)


def _wide(value: Number) -> Number:
    """The value where it is, in double precision where the device has it: sums go over millions of tokens."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)


class Metrics:
    """Sums, counts and extremes by name since the last log.

    Tensors are added where they are and read once, at the log, so that adding a metric does not wait for the device.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Number, Number]] = {}
        self._histograms: dict[str, torch.Tensor] = {}
        self._lows: dict[str, float] = {}
        self._highs: dict[str, float] = {}

    def add(self, name: str, value: Number | None, count: Number = 1.0) -> None:
        """Adds to a mean: `value` is a sum over `count` things.

        A None or NaN from outside counts as nothing: it is a reward that is not known. A tensor comes from the model,
        and what is not finite there makes the mean so.
        """
        if value is None or (not isinstance(value, torch.Tensor) and math.isnan(value)):
            return
        self._accumulate(name, value, count)

    def _accumulate(self, name: str, value: Number, count: Number) -> None:
        total, number = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = total + _wide(value), number + _wide(count)

    def add_all(self, sums: Mapping[str, tuple[Number, Number]]) -> None:
        """Adds (sum, count) pairs by name."""
        for name, (value, count) in sums.items():
            self.add(name, value, count)

    def add_microbatch(self, loss: LossTerms, terms: TokenTerms, batch: TrainingBatch) -> None:
        """Adds what a loss logs of itself, and how the credit spreads over the distilled tokens."""
        self.add_all(loss.sums)
        if terms.credit is not None:
            credit, mask = terms.credit, batch.distillation_mask
            is_small = (credit.abs() < NEAR_ZERO) & mask
            self.add("credit/sparsity", is_small.sum(), mask.sum())
            self.add_histogram("credit", credit, mask)

    def add_histogram(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Adds the entries of `values` that `mask` (same shape, bool) has, for quantiles."""
        values = values.detach().float().flatten()
        bins = torch.bucketize(values, values.new_tensor(EDGES))
        entries = torch.as_tensor(_wide(mask.flatten()))
        counts = entries.new_zeros(len(EDGES) + 1).scatter_add_(0, bins, entries)
        known = self._histograms.get(name)
        # One that was restored lies on the CPU.
        self._histograms[name] = counts if known is None else counts + known.to(counts)

    def add_min(self, name: str, values: Iterable[float]) -> None:
        """Adds to a minimum."""
        self._lows[name] = min([self._lows.get(name, math.inf), *values])

    def add_max(self, name: str, values: Iterable[float]) -> None:
        """Adds to a maximum."""
        self._highs[name] = max([self._highs.get(name, -math.inf), *values])

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers of all accumulators, for another rank to merge."""
        return {
            "sums": {name: (_float(total), _float(number)) for name, (total, number) in self._sums.items()},
            "lows": dict(self._lows),
            "highs": dict(self._highs),
            "histograms": {name: counts.tolist() for name, counts in self._histograms.items()},
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Adds what a snapshot holds."""
        for name, (total, number) in snapshot["sums"].items():
            self._accumulate(name, total, number)
        for name, value in snapshot["lows"].items():
            self.add_min(name, [value])
        for name, value in snapshot["highs"].items():
            self.add_max(name, [value])
        for name, counts in snapshot.get("histograms", {}).items():
            self._histograms[name] = torch.tensor(counts, dtype=torch.float64)

    def copy(self) -> Metrics:
        """The same accumulators, apart from these; what is added replaces tensors, so those are shared."""
        other = Metrics()
        other._sums, other._histograms = dict(self._sums), dict(self._histograms)
        other._lows, other._highs = dict(self._lows), dict(self._highs)
        return other

    def clear(self) -> None:
        """Forgets everything."""
        self._sums.clear()
        self._lows.clear()
        self._highs.clear()
        self._histograms.clear()


class StageClock:
    """Wall seconds by stage of a step, steps and sampled tokens since the last log, and those of the whole run."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._num_steps = self._num_tokens = self._num_tokens_of_run = 0
        self.of_run: dict[str, float] = {}
        """Seconds by stage since the run began."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time spent inside to the stage."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        for total in (self._seconds, self.of_run):
            total[stage] = total.get(stage, 0.0) + seconds

    def count_step(self) -> None:
        """An optimizer step begins."""
        self._num_steps += 1

    def count_tokens(self, number: int) -> None:
        """So many tokens were sampled."""
        self._num_tokens += number
        self._num_tokens_of_run += number

    @property
    def tokens_per_second(self) -> float:
        """Tokens sampled in a second of the stage "generation", since the run began."""
        return _rate(self._num_tokens_of_run, self.of_run)

    def per_step(self) -> dict[str, float]:
        """Seconds an optimizer step by `time/<stage>`, and tokens a second of generation; starts over."""
        values = {f"time/{stage}": seconds / max(self._num_steps, 1) for stage, seconds in self._seconds.items()}
        if self._num_tokens:
            values["time/sampled_tokens_per_second"] = _rate(self._num_tokens, self._seconds)
        self._seconds.clear()
        self._num_steps = self._num_tokens = 0
        return values

    def clear(self) -> None:
        """Forgets everything: another run begins."""
        self._seconds.clear()
        self.of_run.clear()
        self._num_steps = self._num_tokens = self._num_tokens_of_run = 0


def _rate(num_tokens: int, seconds: Mapping[str, float]) -> float:
    """0 where no time was spent on them, as in a block of which only an error is left."""
    spent = seconds.get("generation", 0.0)
    return num_tokens / spent if spent else 0.0


def merge(snapshots: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Values to log: sum over sum, minimum of minima, maximum of maxima. None where nothing was counted.

    A name need not be known to every snapshot. A sum that is not finite gives such a mean. A histogram gives its
    quantiles, `<name>/q05` and so on.
    """
    sums: dict[str, tuple[float, float]] = {}
    histograms: dict[str, list[float]] = {}
    lows: dict[str, float] = {}
    highs: dict[str, float] = {}
    for snapshot in snapshots:
        for name, (value, count) in snapshot["sums"].items():
            total, number = sums.get(name, (0.0, 0.0))
            sums[name] = (total + value, number + count)
        for name, value in snapshot["lows"].items():
            lows[name] = min(value, lows.get(name, math.inf))
        for name, value in snapshot["highs"].items():
            highs[name] = max(value, highs.get(name, -math.inf))
        for name, counts in snapshot.get("histograms", {}).items():
            histograms[name] = [x + y for x, y in zip(counts, histograms.get(name, [0.0] * len(counts)), strict=True)]
    means = {name: total / number if number else None for name, (total, number) in sums.items()}
    extremes = {name: value if math.isfinite(value) else None for name, value in [*lows.items(), *highs.items()]}
    quantiles = {
        f"{name}/q{round(100 * share):02d}": quantile(counts, share)
        for name, counts in histograms.items()
        for share in QUANTILES
    }
    return {**means, **extremes, **quantiles}


def quantile(counts: Sequence[float], share: float) -> float | None:
    """The value that `share` of a histogram's entries stay below, linear within its bin; None of an empty one.

    `counts`: of the bins between `EDGES`, and of the two beyond them, which count as the outermost edge.
    """
    reached = list(accumulate(counts))
    if not reached[-1]:
        return None
    wanted = share * reached[-1]
    index = bisect_left(reached, wanted)
    while not counts[index]:  # a share of 0 begins at the first entry
        index += 1
    low, high = EDGES[max(index - 1, 0)], EDGES[min(index, len(EDGES) - 1)]
    return low + (high - low) * (wanted - (reached[index] - counts[index])) / counts[index]


# --- what a block of completions looks like --------------------------------------------------


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def observe_rewards(metrics: Metrics, block: Sequence[ScoredRollout], *, tolerance: float) -> bool:
    """Adds reward metrics of a whole block (all ranks' rows); true where no group has rewards that differ.

    Rows without a valid reward are in none of them. Standard deviations are unbiased.
    """
    groups: dict[int, list[float]] = defaultdict(list)
    for row in block:
        if row.reward is not None:
            groups[row.rollout.group].append(row.reward)
    rewards = [reward for group in groups.values() for reward in group]
    stds = [_std(group) for group in groups.values()]
    num_flat = sum(std <= tolerance for std in stds)
    if rewards:
        metrics.add("reward", sum(rewards), len(rewards))
        metrics.add("self_distillation/reward_mean", sum(rewards), len(rewards))
        metrics.add("reward_std", sum(stds), len(stds))
        metrics.add("self_distillation/reward_std", _std(rewards))
        metrics.add_min("self_distillation/reward_min", [min(rewards)])
        metrics.add_max("self_distillation/reward_max", [max(rewards)])
        metrics.add("self_distillation/group_reward_std_mean", sum(stds), len(stds))
        metrics.add("self_distillation/flat_group_fraction", num_flat, len(stds))
    for name in block[0].rewards if block else ():
        valid = [value for row in block if (value := row.rewards[name]) is not None]
        metrics.add(f"self_distillation/rewards/{name}", sum(valid), len(valid))
        metrics.add(f"rewards/{name}/mean", sum(valid), len(valid))
    return num_flat == len(stds)


def count_distilled(
    block: Sequence[ScoredRollout], contexts: Sequence[TeacherContext], *, masks_truncated: bool
) -> int:
    """Rows of a block whose teacher is shown more than the question, without truncated ones where those are masked."""
    pairs = zip(block, contexts, strict=True)
    return sum(c.is_informative and not (masks_truncated and r.rollout.completion.is_truncated) for r, c in pairs)


def observe_rows(metrics: Metrics, rows: Sequence[Row]) -> None:
    """Adds length and truncation metrics of this rank's rows. Lengths are in tokens, the end token included."""
    rollouts = [row.scored.rollout for row in rows]
    lengths = [len(rollout.completion.ids) for rollout in rollouts]
    finished = [len(r.completion.ids) for r in rollouts if not r.completion.is_truncated]
    for name, values in (("", lengths), ("_terminated", finished)):
        metrics.add(f"completions/mean{name}_length", sum(values), len(values))
        metrics.add_min(f"completions/min{name}_length", values)
        metrics.add_max(f"completions/max{name}_length", values)
    metrics.add("completions/clipped_ratio", len(lengths) - len(finished), len(lengths))
    metrics.add("prompts/truncated_fraction", sum(r.is_prompt_truncated for r in rollouts), len(rollouts))
    metrics.add("teacher_prompts/shortened_fraction", sum(row.is_context_shortened for row in rows), len(rows))
