"""The weight that corrects for a sampler whose probabilities are not quite the trainer's.

An engine with kernels of its own gives a token another log-prob than the trainer does, for the same weights. So the
tokens are not drawn from the policy that is trained, and a loss on them is off; the importance ratio puts that right.

Letters: B rows, T completion.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdpo.losses.divergence import masked
from sdpo.losses.policy import MAX_LOG_RATIO
from sdpo.types import SamplerCorrection


def sampler_weight(
    logps: Tensor, sampled_logps: Tensor, mask: Tensor, *, mode: SamplerCorrection, cap: float
) -> tuple[Tensor, Tensor]:
    """Importance weight p_trainer / p_sampler (B, T), without gradient, and where it is above `cap` (B, T).

    `logps` (B, T) of the tokens under the weights that sampled, as the trainer computes them, and `sampled_logps`
    (B, T), as the sampler did, both in nats. `mode`: "token_*", the ratio of each token; "sequence_*", the product of
    the ratios over the masked tokens of the row, the same at each of them. Above the cap "*_truncate" gives the cap
    (Ionides, "Truncated Importance Sampling", 2008) and "*_mask" gives 0; there is no bound below. The modes are those
    of `vllm_importance_sampling_mode` in trl. A token whose `sampled_logps` is not finite has the ratio 1: nothing is
    known of it. Off `mask` (B, T) the weight is 1 and nothing is cut, whatever is there.
    """
    is_known = mask & sampled_logps.isfinite()
    log_ratio = masked(logps.detach(), is_known) - masked(sampled_logps.detach(), is_known)
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    is_cut = (ratio > cap) & mask
    weight = ratio.clamp(max=cap) if mode.endswith("truncate") else ratio.masked_fill(is_cut, 0.0)
    return torch.where(mask, weight, 1.0), is_cut
