"""Advantages of a block's rewards, and the clipped policy-gradient loss of its tokens.

Letters: N rows of a block, B rows of a microbatch, T completion.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdpo.losses.divergence import masked
from sdpo.types import ImportanceSamplingLevel, ScaleRewards

STD_EPSILON = 1e-4
"""Added to a standard deviation of rewards before dividing by it."""

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio before exp. Its exp, 4.9e8, is far beyond use; an infinite one times an advantage 0 is NaN."""


def group_advantages(rewards: Tensor, groups: Tensor, *, scale: ScaleRewards) -> Tensor:
    """Reward less the mean of its group, in units of a standard deviation (N,), fp32.

    `rewards` (N,), NaN for a row without a valid reward: that row is in no mean and no deviation, and gets 0. `groups`
    (N,), integers, equal for the completions of one prompt. `scale`: "group" divides by the standard deviation of the
    group (arXiv 2402.03300), "batch" by that of all valid rewards, "none" by nothing at all (arXiv 2503.20783). The
    deviation is the unbiased one plus `STD_EPSILON`. Equal rewards, or only one, give 0 exactly.
    """
    group = torch.unique(groups, return_inverse=True)[1]
    is_valid = ~rewards.isnan()
    rewards = torch.where(is_valid, rewards.double(), 0.0)

    def sum_by_group(values: Tensor) -> Tensor:
        """For each row, the sum of `values` (N,) over the valid rows of its group."""
        values = torch.where(is_valid, values, 0.0)
        return torch.zeros_like(values).index_add_(0, group, values)[group]

    # Measured from the lowest of the group, the mean of equal rewards has no rounding error to be divided by 1e-4.
    rewards_or_inf = torch.where(is_valid, rewards, torch.inf)
    lowest = torch.full_like(rewards, torch.inf).scatter_reduce_(0, group, rewards_or_inf, "amin")[group]
    above_lowest = torch.where(is_valid, rewards - lowest, 0.0)
    num_valid = sum_by_group(torch.ones_like(rewards))
    centered = torch.where(is_valid, above_lowest - sum_by_group(above_lowest) / num_valid, 0.0)

    if scale == "group":
        std = (sum_by_group(centered.square()) / (num_valid - 1).clamp(min=1)).sqrt()
        centered = centered / (std + STD_EPSILON)
    elif scale == "batch":
        num_rows = is_valid.sum()
        deviation = torch.where(is_valid, rewards - rewards.sum() / num_rows, 0.0)
        std = (deviation.square().sum() / (num_rows - 1).clamp(min=1)).sqrt()
        centered = centered / (std + STD_EPSILON)
    return centered.float()


def policy_loss(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    level: ImportanceSamplingLevel,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) (B, T), and where it was clipped (B, T).

    To be minimized; unreduced; 0 and false off `mask` (B, T). `logps` (B, T) in nats; `old_logps` (B, T), those under
    the weights that sampled, None where they are the current ones: then r is 1, with the gradient of logp.
    `advantages` (B,). `level`: "token", r = exp(logp - old_logp) (arXiv 1707.06347); "sequence", r = exp of the mean
    of that difference over the masked tokens of the row, the same at each of them (arXiv 2507.18071). Two bounds as in
    arXiv 2503.14476. A token counts as clipped where the clipped branch is the smaller one: it has no gradient then.
    """
    logps = masked(logps, mask)
    old_logps = logps.detach() if old_logps is None else masked(old_logps, mask)
    log_ratio = logps - old_logps
    if level == "sequence":
        mean = log_ratio.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
        log_ratio = mean.expand_as(logps)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages = advantages.to(ratio.dtype).unsqueeze(-1)

    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    is_too_low = (ratio < 1 - epsilon) & (advantages < 0)
    is_too_high = (ratio > 1 + epsilon_high) & (advantages > 0)
    return masked(loss, mask), (is_too_low | is_too_high) & mask


def reference_kl(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """Estimate r - log r - 1, r = p_reference / p, of KL(policy||reference) per token (...), in nats, never negative.

    The estimator k3 of Schulman, "Approximating KL divergence", as in arXiv 2402.03300; of the log-probs (...) of a
    token drawn from the policy. Unlike there, log r is bounded above by `MAX_LOG_RATIO`.
    """
    log_ratio = (reference_logps.detach() - logps).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio
