"""The loss of one microbatch: (1 - w) policy + w distillation, each a masked sum over its own count of the whole step.

Counts are global, over all ranks and all microbatches of the optimizer step. The losses of the microbatches of all
ranks therefore add up to the loss of the step. Nothing here branches on whether a mask is empty: a sum over nothing is
a zero on the graph, and every rank runs the same backward.

Letters: B rows, T completion.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sdpo.losses.divergence import importance_weight, masked
from sdpo.losses.policy import policy_loss, reference_kl
from sdpo.losses.sampler import sampler_weight
from sdpo.types import LossTerms, LossType, ObjectiveSettings, TokenTerms, TrainingBatch

Fraction = tuple[Tensor, Tensor]
"""Numerator and denominator, 0-dim; the value is the sum of numerators over the sum of denominators."""


class TermCounts(NamedTuple):
    """The counts of the whole step for one term; see `LossCounts`."""

    tokens: float | Tensor
    sequences: float | Tensor
    microbatches: float | Tensor


def own_counts(mask: Tensor) -> TermCounts:
    """The counts of a step that is this microbatch alone; `mask` (B, T)."""
    return TermCounts(mask.sum(), mask.any(dim=-1).sum(), 1.0)


def loss_fraction(per_token: Tensor, mask: Tensor, *, loss_type: LossType, max_completion_length: int) -> Fraction:
    """What a microbatch adds to numerator and denominator of its term of the loss; `per_token`, `mask` (B, T).

    A sequence counts where one of its tokens is in the mask.
    "dapo": sum over tokens / tokens (arXiv 2503.14476).
    "grpo": sum over sequences of the mean over their tokens / sequences (arXiv 2402.03300).
    "dr_grpo": sum over tokens / (sequences * max_completion_length) (arXiv 2503.20783).
    "bnpo": mean over the tokens of the microbatch / 1 microbatch.
    """
    per_token = masked(per_token, mask)
    num_tokens = mask.sum(dim=-1).to(per_token.dtype)
    num_sequences = (num_tokens > 0).to(per_token.dtype).sum()
    if loss_type == "grpo":
        return (per_token.sum(dim=-1) / num_tokens.clamp(min=1)).sum(), num_sequences
    if loss_type == "dr_grpo":
        return per_token.sum(), num_sequences * max_completion_length
    if loss_type == "bnpo":
        return per_token.sum() / num_tokens.sum().clamp(min=1), torch.ones_like(num_sequences)
    return per_token.sum(), num_tokens.sum()


def reduce_loss(
    per_token: Tensor,
    mask: Tensor,
    *,
    loss_type: LossType,
    tokens: float | Tensor,
    sequences: float | Tensor,
    microbatches: float | Tensor,
    max_completion_length: int,
) -> Tensor:
    """Share of a microbatch in the step's value of one term, 0-dim; the sum over microbatches and ranks is the value.

    `per_token`, `mask` (B, T). The counts are those of the step for this term (see `LossCounts`), `loss_fraction` says
    which one divides. An empty mask gives 0 on the graph, also where the whole step is empty.
    """
    numerator, _ = loss_fraction(per_token, mask, loss_type=loss_type, max_completion_length=max_completion_length)
    denominators: dict[LossType, float | Tensor] = {
        "dapo": tokens,
        "grpo": sequences,
        "dr_grpo": sequences * max_completion_length,
        "bnpo": microbatches,
    }
    return numerator / torch.as_tensor(denominators[loss_type], dtype=numerator.dtype).clamp(min=1)


def mean_fraction(values: Tensor, mask: Tensor) -> Fraction:
    """Sum of `values` (B, T) over `mask` (B, T), and the number of its tokens."""
    values = masked(values.detach(), mask)
    return values.sum(), mask.sum().to(values.dtype)


def _logged(per_token: Tensor, mask: Tensor, settings: ObjectiveSettings) -> Fraction:
    """The term's numerator and denominator from this microbatch (B, T), for the log."""
    length = settings.max_completion_length
    return loss_fraction(per_token.detach(), mask, loss_type=settings.loss_type, max_completion_length=length)


def _reduced(per_token: Tensor, mask: Tensor, settings: ObjectiveSettings, counts: TermCounts) -> Tensor:
    """The term's share of the step's loss from this microbatch (B, T)."""
    return reduce_loss(
        per_token,
        mask,
        loss_type=settings.loss_type,
        tokens=counts.tokens,
        sequences=counts.sequences,
        microbatches=counts.microbatches,
        max_completion_length=settings.max_completion_length,
    )


def sampler_correction(
    logps: Tensor, batch: TrainingBatch, mask: Tensor, settings: ObjectiveSettings
) -> tuple[Tensor | None, dict[str, Fraction]]:
    """Weight of each token's loss for the sampler's own log-probs (B, T), None for none, and what to log of it.

    `logps` (B, T) under the current weights; `mask` (B, T), the tokens of either term.
    """
    sampled = batch.sampled_logps
    if settings.sampler_correction is None or sampled is None:
        return None, {}
    trainer = logps.detach() if batch.old_logps is None else batch.old_logps
    weight, is_cut = sampler_weight(trainer, sampled, mask, mode=settings.sampler_correction, cap=settings.sampler_cap)
    is_known = mask & sampled.isfinite()
    return weight, {
        "sampling/logp_difference": mean_fraction((trainer - sampled).abs(), is_known),
        "sampling/importance_weight": mean_fraction(weight, mask),
        "sampling/cut_fraction": mean_fraction(is_cut.to(weight.dtype), mask),
        "sampling/unknown_fraction": mean_fraction((~is_known).to(weight.dtype), mask),
    }


def policy_term(
    terms: TokenTerms, batch: TrainingBatch, settings: ObjectiveSettings, correction: Tensor | None = None
) -> LossTerms:
    """Clipped surrogate plus beta times the KL to the reference policy, over the tokens of `policy_mask`.

    `correction` (B, T) weighs the surrogate, not the KL.
    """
    mask, step = batch.policy_mask, batch.counts
    per_token, is_clipped = policy_loss(
        terms.logps,
        batch.old_logps,
        batch.advantages,
        mask,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        level=settings.importance_sampling_level,
    )
    sums: dict[str, Fraction] = {}
    if batch.old_logps is not None:
        sums["policy/clip_fraction"] = mean_fraction(is_clipped.to(per_token.dtype), mask)
    if correction is not None:
        per_token = per_token * correction
    if settings.beta > 0:
        assert batch.reference_logps is not None, "a beta above 0 needs the reference's log-probs"
        kl = reference_kl(masked(terms.logps, mask), masked(batch.reference_logps, mask))
        per_token = per_token + settings.beta * kl
        sums["kl"] = mean_fraction(kl, mask)

    if step is None:
        counts = own_counts(mask)
    else:
        counts = TermCounts(step.policy_tokens, step.policy_sequences, step.microbatches)
    sums["self_distillation/policy_loss"] = _logged(per_token, mask, settings)
    return LossTerms(_reduced(per_token, mask, settings, counts), sums)


def distillation_term(
    terms: TokenTerms, batch: TrainingBatch, settings: ObjectiveSettings, correction: Tensor | None = None
) -> LossTerms:
    """Divergence of student and teacher over the tokens of `distillation_mask`, weighed by `correction` (B, T).

    Where the block is reused, each token is weighed by its truncated importance ratio; `is_clip` None turns that off.
    """
    assert terms.divergence is not None, "a distillation weight above 0 needs the divergence"
    mask, step = batch.distillation_mask, batch.counts
    per_token = terms.divergence
    if batch.old_logps is not None and settings.is_clip is not None:
        logps, old_logps = masked(terms.logps, mask), masked(batch.old_logps, mask)
        per_token = per_token * importance_weight(logps, old_logps, cap=settings.is_clip)
    if correction is not None:
        per_token = per_token * correction

    if step is None:
        counts = own_counts(mask)
    else:
        counts = TermCounts(step.distillation_tokens, step.distillation_sequences, step.microbatches)
    sums = {"self_distillation/distillation_loss": _logged(per_token, mask, settings)}
    if terms.credit is not None:
        sums["credit/mean"] = mean_fraction(terms.credit, mask)
        sums["credit/positive_fraction"] = mean_fraction((terms.credit > 0).to(terms.credit.dtype), mask)
    return LossTerms(_reduced(per_token, mask, settings, counts), sums)


def objective(terms: TokenTerms, batch: TrainingBatch, settings: ObjectiveSettings) -> LossTerms:
    """(1 - w) policy + w distillation of one microbatch, w = `settings.weight`, and what to log of it.

    A term of weight 0 is not computed and not logged; beta belongs to the policy term. Without `batch.counts` the
    microbatch is its own step. Where the sampler has log-probs of its own, both terms are weighed for it, beta's KL is
    not, and the denominators stay. Metrics: each term's value under its own reduction (see `loss_fraction`) before its
    weight; "kl", the estimate that beta multiplies; "entropy", over the tokens of the terms computed; the credit
    log teacher - log student of the sampled tokens; and sampler and trainer compared. All in nats but fractions and
    weights.
    """
    loss = terms.logps.new_zeros(())
    in_loss = torch.zeros_like(batch.completion_mask)
    if settings.weight < 1:
        in_loss = in_loss | batch.policy_mask
    if settings.weight > 0:
        in_loss = in_loss | batch.distillation_mask
    correction, sums = sampler_correction(terms.logps, batch, in_loss, settings)
    if settings.weight < 1:
        policy = policy_term(terms, batch, settings, correction)
        loss = loss + (1 - settings.weight) * policy.loss
        sums.update(policy.sums)
    if settings.weight > 0:
        distillation = distillation_term(terms, batch, settings, correction)
        loss = loss + settings.weight * distillation.loss
        sums.update(distillation.sums)
    sums["entropy"] = mean_fraction(terms.entropy, in_loss)
    return LossTerms(loss, sums)


def blend(policy: float, distillation: float, *, weight: float) -> float:
    """(1 - w) policy + w distillation."""
    return (1 - weight) * policy + weight * distillation
