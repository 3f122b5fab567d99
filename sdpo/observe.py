"""What a block of completions looks like, as metrics. Names are the ones users' dashboards know."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from sdpo.metrics import Metrics
from sdpo.types import Row, ScoredRollout


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
