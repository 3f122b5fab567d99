"""The losses as their formulas say, for autograd, and the settings they are tested under.

Written for reading, on whole tensors of probabilities, and without anything of `sdpo.losses`. Letters: V vocabulary,
K support; ... is any number of leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdpo.types import ObjectiveSettings

SETTINGS = ObjectiveSettings(
    loss_type="dapo",
    max_completion_length=5,
    temperature=1.0,
    beta=0.0,
    epsilon=0.2,
    epsilon_high=0.2,
    importance_sampling_level="token",
    weight=1.0,
    alpha=1.0,
    mode="full_logits",
    topk=None,
    is_clip=2.0,
    add_tail=False,
    sampler_correction=None,
    sampler_cap=2.0,
)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(P||Q) (...) in nats, of probabilities (..., K): the sum of p log(p / q) over the outcomes that P has."""
    has = p > 0
    return torch.zeros_like(p).masked_scatter(has, p[has] * (p[has].log() - q[has].log())).sum(-1)


def divergence(p: Tensor, q: Tensor, *, alpha: float) -> Tensor:
    """Divergence (...) in nats that `alpha` names, of the student's p and the teacher's q (..., K)."""
    if alpha == 0:
        return kl(q, p)
    if alpha == 1:
        return kl(p, q)
    m = (1 - alpha) * p + alpha * q
    return (1 - alpha) * kl(p, m) + alpha * kl(q, m)


def sampled_token_kl(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """log s - log t (...) in nats, with gradient (log s - log t) d log s, of a sampled token's log-probs (...)."""
    gap = (student_logp - teacher_logp).detach()
    return gap + gap * (student_logp - student_logp.detach())


def distillation(student: Tensor, teacher: Tensor, ids: Tensor, settings: ObjectiveSettings) -> Tensor:
    """Divergence (...) in nats, fp64, in the mode of `settings`, of logits (..., V) and the sampled ids (...)."""
    p, q = student.double().softmax(-1), teacher.double().softmax(-1)
    if settings.mode == "sampled_token":
        chosen_p, chosen_q = (x.gather(-1, ids.unsqueeze(-1)).squeeze(-1) for x in (p, q))
        return sampled_token_kl(chosen_p.log(), chosen_q.log())
    if settings.mode == "topk_logits":
        support = p.topk(settings.topk, -1).indices
        inside = [x.gather(-1, support) for x in (p, q)]
        if settings.add_tail:
            outside = [x.scatter(-1, support, 0.0).sum(-1, keepdim=True) for x in (p, q)]
            p, q = (torch.cat(parts, -1) for parts in zip(inside, outside, strict=True))
        else:
            p, q = (x / x.sum(-1, keepdim=True) for x in inside)
    return divergence(p, q, alpha=settings.alpha)
