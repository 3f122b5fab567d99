"""Distances of a student S and a teacher T, per token, in nats.

A distance takes two aligned log-prob tensors over one support and returns one value a token, unreduced, together with
its derivative. The support is the vocabulary, or the top k ids, renormalized or with one more bucket for the rest.
Where the log-probs came from is the caller's business. Half precision is computed in fp32; fp32 and fp64 stay as they
are. No gradient reaches the teacher.

A bucket without mass adds nothing to an expectation over it (0 log 0 = 0). Log-probs of masked positions can be
anything, NaN included: pass them through `masked` first, since a `torch.where` after the logarithm is too late for the
gradient.

Letters: N tokens, V vocabulary, K support; ... is any number of leading dimensions, such as (N,) or (B, T).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _upcast(values: Tensor) -> Tensor:
    """The same values, in fp32 where they are in half precision."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _aligned(student_logps: Tensor, teacher_logps: Tensor) -> tuple[Tensor, Tensor]:
    """Both log-probs (...), at least fp32, the teacher's off the graph."""
    # Broadcasting would turn a misaligned support into a plausible number.
    assert student_logps.shape == teacher_logps.shape, f"{student_logps.shape} != {teacher_logps.shape}"
    return _upcast(student_logps), _upcast(teacher_logps.detach())


def _kl(p_logps: Tensor, q_logps: Tensor) -> Tensor:
    """KL(P||Q) (...) in nats of two log-probs (..., K): sum_k p_k (log p_k - log q_k)."""
    # Where p underflows, p (log p - log q) would be 0 * inf. With both logs at 0 the bucket adds 1 * (0 - 0).
    has_mass = p_logps > math.log(torch.finfo(p_logps.dtype).tiny)
    p_logps = torch.where(has_mass, p_logps, 0.0)
    q_logps = torch.where(has_mass, q_logps, 0.0)
    return (p_logps.exp() * (p_logps - q_logps)).sum(dim=-1)


def divergence_and_slope(
    student_logps: Tensor, teacher_logps: Tensor, student_probs: Tensor, *, alpha: float
) -> tuple[Tensor, Tensor]:
    """Divergence D per token (...), in nats, and p dD/dp by outcome (..., K), up to a multiple of p.

    log p and log q (..., K) are the log-probs of student and teacher, p (..., K) those of the student without the log.

    `alpha` 0: KL(T||S). 1: KL(S||T), one summand of eq. 1 of arXiv 2601.20802. a strictly between: the generalized
    Jensen-Shannon divergence of arXiv 2306.13649, (1 - a) KL(S||M) + a KL(T||M) with M = (1 - a) S + a T. It lies
    between 0 and the entropy of a coin of bias a, at most log 2. It tends to 0 at both ends, not to a KL: D / a tends
    to KL(T||S) for a -> 0, and D / (1 - a) tends to KL(S||T) for a -> 1. A small `alpha` therefore also scales the
    loss down.

    The slope is -q for KL(T||S), p log(p / q) for KL(S||T), and between them (1 - a) p log(p / m). The gradient of D
    with respect to logits of which p is the softmax is the slope less p times its sum over the outcomes, in which any
    multiple of p cancels: p - q and p (log(p / q) - D) for the two KL. The slope is 0 at an outcome that S lacks,
    except under KL(T||S), which is infinite where T has it.
    """
    student_logps, teacher_logps = _aligned(student_logps, teacher_logps)
    if alpha == 0.0:
        return _kl(teacher_logps, student_logps), -teacher_logps.exp()
    if alpha == 1.0:
        slope = torch.where(student_probs > 0, student_probs * (student_logps - teacher_logps), 0.0)
        return slope.sum(-1), slope
    mixture_logps = torch.logaddexp(student_logps + math.log1p(-alpha), teacher_logps + math.log(alpha))
    slope = torch.where(student_probs > 0, (1 - alpha) * student_probs * (student_logps - mixture_logps), 0.0)
    return slope.sum(-1) + alpha * _kl(teacher_logps, mixture_logps), slope


def renormalize(logps: Tensor) -> Tensor:
    """Log-probs (..., K) given that the token is in the support: they sum to 1 over the last dimension."""
    return torch.log_softmax(_upcast(logps), dim=-1)


def with_tail(logps: Tensor, log_tail: Tensor) -> Tensor:
    """Log-probs (..., K + 1): the support (..., K), then one bucket for everything outside it (...).

    Eq. 11 of arXiv 2601.20802. Both must be normalized by the logsumexp over the whole vocabulary.
    """
    return torch.cat([_upcast(logps), _upcast(log_tail).unsqueeze(-1)], dim=-1)


def tail_logp(logits: Tensor, support_ids: Tensor, *, log_normalizer: Tensor | None = None) -> Tensor:
    """Log of the mass outside the support (N,), in nats, of logits (N, V) and distinct ids (N, K); -inf where K = V.

    The logsumexp of the complement less that of the vocabulary. The shorter log(1 - p) cancels: in fp32 it ends at
    -16.6 where the tail is lighter still. `log_normalizer` (N,): the logsumexp over the vocabulary, where the caller
    has it. Makes one tensor (N, V), the logits without the support.
    """
    logits = _upcast(logits)
    if log_normalizer is None:
        log_normalizer = logits.logsumexp(dim=-1)
    return logits.scatter(-1, support_ids, -math.inf).logsumexp(dim=-1) - log_normalizer


def rest_logp(logps: Tensor) -> Tensor:
    """Log of the mass outside a support (...), in nats, from normalized log-probs (..., K); at least fp32's smallest.

    Only as precise as the log-probs: a rest below their rounding is lost, where `tail_logp` would find it.
    """
    mass = _upcast(logps).exp().sum(dim=-1)
    return (1 - mass).clamp(min=torch.finfo(mass.dtype).tiny).log()


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` (...) or (..., K) where `mask` (...) is true, else 0, which is also their gradient there.

    To be applied to log-probs before anything is computed from them: what follows is then finite everywhere, whatever
    padding holds.
    """
    return torch.where(mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim)), values, 0.0)


def importance_weight(logps: Tensor, old_logps: Tensor, *, cap: float) -> Tensor:
    """min(exp(logp - old_logp), cap) per token (...), without gradient, of log-probs (...) in nats.

    Re-weighs tokens drawn under earlier weights to the current ones. Truncated above, where a few tokens could carry
    the whole loss, and not below.
    """
    return (_upcast(logps.detach()) - _upcast(old_logps.detach())).exp().clamp(max=cap)
