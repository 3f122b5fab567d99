"""A chunk of tokens: their values, and the gradient of the loss with respect to their logits.

All work on (n, V) tensors is here, in memory that the next chunk uses again. Letters: n tokens, H hidden size, V
vocabulary, K support.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sdpo.heads import Head
from sdpo.losses import divergence as dv
from sdpo.types import ObjectiveSettings

# Logits held at once, in numbers: on a CPU enough for the products to run at full speed, elsewhere to fill the device.
CPU_CHUNK, DEVICE_CHUNK = 2**23, 2**26
LOWEST = -1e30  # stands for a logit of -inf where it would be multiplied by 0


class Taught(NamedTuple):
    """A part of the teacher: its head, its share of the logits, and its hidden states (N, H)."""

    head: Head
    share: float
    hidden: Tensor


class ServedValues(NamedTuple):
    """A teacher scored elsewhere: log-prob of the token (N,), and ids and log-probs (N, K) of its support."""

    logps: Tensor
    ids: Tensor
    support_logps: Tensor


TeacherInput = Sequence[Taught] | ServedValues
"""What a teacher's distribution is made of: parts whose logits add up, or values scored elsewhere; empty for none."""


class TokenValues(NamedTuple):
    """Each (N,), fp32, no gradient: log-prob of the token, entropy, divergence and credit (both None untaught)."""

    logps: Tensor
    entropy: Tensor
    divergence: Tensor | None
    credit: Tensor | None


class Likeliest(NamedTuple):
    """Ids and log-probs (N, K) of the likeliest tokens of student and teacher, and the credit of the token (N,)."""

    student_ids: Tensor
    student_logps: Tensor
    teacher_ids: Tensor
    teacher_logps: Tensor
    credit: Tensor


def chunk_size(head: Head, device: torch.device) -> int:
    """Tokens a chunk."""
    numbers = CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK
    vocabulary: int = head.module.weight.shape[0]
    return -(-numbers // vocabulary)


class Room:
    """Memory for the (n, V) tensors of a chunk, used again by the next one: fresh memory costs as much as a pass."""

    def __init__(self, num_rows: int, head: Head, device: torch.device):
        self._shape, self._device = (num_rows, head.module.weight.shape[0]), device
        self._taken: dict[str, Tensor] = {}

    def take(self, name: str, num_rows: int) -> Tensor:
        """(num_rows, V) fp32, of any content."""
        if name not in self._taken:
            self._taken[name] = torch.empty(self._shape, device=self._device)
        return self._taken[name][:num_rows]


class _Student:
    """What n tokens' logits (n, V) are turned into, in their own memory: the student's distribution, and values."""

    def __init__(self, logits: Tensor, ids: Tensor, room: Room):
        self.ids = ids
        self.top = logits.amax(-1, keepdim=True)
        self.shifted = logits.sub_(self.top).clamp_(min=LOWEST)
        self.mass = torch.exp(self.shifted, out=room.take("mass", len(ids)))
        self.total = self.mass.sum(-1)
        self.log_total = self.total.log()
        self.logps = self.at(ids.unsqueeze(-1)).squeeze(-1)
        product = torch.mul(self.mass, self.shifted, out=room.take("scratch", len(ids)))
        self.entropy = self.log_total - product.sum(-1) / self.total

    def at(self, support: Tensor) -> Tensor:
        """(n, K) log-probs of the ids `support`."""
        return self.shifted.gather(-1, support) - self.log_total.unsqueeze(-1)


class Teaching(NamedTuple):
    """Divergence and credit (n,), and the gradient of the divergence with respect to the student's logits.

    It is p * base, p being the student's distribution and base (n,) or None for 0, plus `extra` (n, K) at the ids
    `support` (n, K), plus `slope` (n, V) divided by the total of the student's mass.
    """

    divergence: Tensor
    credit: Tensor | None
    base: Tensor | None = None
    support: Tensor | None = None
    extra: Tensor | None = None
    slope: Tensor | None = None


class Chunk:
    """Values of n tokens, and then the gradient with respect to their logits. Takes the memory of `logits` (n, V)."""

    def __init__(
        self,
        logits: Tensor,
        ids: Tensor,
        taught: TeacherInput,
        settings: ObjectiveSettings,
        *,
        head: Head,
        room: Room,
    ):
        self.head, self.temperature = head, settings.temperature
        self.student = _Student(logits, ids, room)
        if isinstance(taught, ServedValues):
            self.teaching: Teaching | None = _teach_served(self.student, taught, settings)
        else:
            self.teaching = _teach(self.student, taught, settings, room) if taught else None
        distance, credit = (None, None) if self.teaching is None else self.teaching[:2]
        self.values = TokenValues(self.student.logps, self.student.entropy, distance, credit)

    @property
    def is_sparse(self) -> bool:
        """Whether the divergence has a gradient on its support only."""
        return self.teaching is not None and self.teaching.base is None and self.teaching.slope is None

    def gradient(self, of_logps: Tensor | None, of_divergence: Tensor | None) -> Tensor:
        """(n, V) with respect to the output of the head."""
        student, teaching = self.student, self.teaching
        derivative = self._derivative()
        base = torch.zeros_like(student.logps) if of_logps is None else -of_logps
        if of_divergence is not None and teaching is not None and teaching.base is not None:
            base = base + teaching.base * of_divergence
        gradient = student.mass.mul_((base / student.total).unsqueeze(-1))
        if of_divergence is not None and teaching is not None:
            if teaching.slope is not None:
                gradient.addcmul_(teaching.slope, (of_divergence / student.total).unsqueeze(-1))
            if teaching.support is not None and teaching.extra is not None:
                gradient.scatter_add_(-1, teaching.support, teaching.extra * of_divergence.unsqueeze(-1))
        if of_logps is not None:
            gradient.scatter_add_(-1, student.ids.unsqueeze(-1), of_logps.unsqueeze(-1))
        return gradient if isinstance(derivative, float) and derivative == 1.0 else gradient.mul_(derivative)

    def _derivative(self) -> Tensor | float:
        """Of the logits by the head's output; a traced graph does that itself."""
        head, temperature = self.head, self.temperature
        if not head.is_plain:
            return 1.0
        output = self.student.shifted.add(self.student.top) * temperature if head.after.is_curved else None
        derivative: Tensor | float = head.after.derivative(output, head.number)
        return derivative / temperature


class _Teacher:
    """The teacher's logits (n, V), and of each token the log normalizer and the credit (n,)."""

    def __init__(self, taught: Sequence[Taught], student: _Student, temperature: float, room: Room):
        self.logits = _mix(taught, temperature, room)
        top = self.logits.amax(-1, keepdim=True)
        mass = torch.sub(self.logits, top, out=room.take("scratch", len(top))).exp_()
        self.log_z = mass.sum(-1).log_().add_(top.squeeze(-1))
        self.credit = _gather(self.logits, student.ids) - self.log_z - student.logps


def _teach(student: _Student, taught: Sequence[Taught], settings: ObjectiveSettings, room: Room) -> Teaching:
    """Divergence, credit and gradient of the mode that `settings` name."""
    if settings.mode == "topk_logits":
        return _teach_topk(student, taught, settings, room)
    teacher = _Teacher(taught, student, settings.temperature, room)
    credit = teacher.credit
    if settings.mode == "sampled_token":
        # log s - log t of a token drawn from S estimates KL(S||T), and (log s - log t) d log s, the score-function
        # estimator, its gradient, both without bias. The gradient of the value alone is d log s, of expectation 0.
        return Teaching(-credit, credit, base=credit, support=student.ids.unsqueeze(-1), extra=-credit.unsqueeze(-1))
    if settings.alpha == 1.0:
        return _reverse_kl(student, teacher)
    # Not in place: the derivative of a capped head is made from `shifted`.
    logps = torch.sub(student.shifted, student.log_total.unsqueeze(-1), out=room.take("scratch", len(credit)))
    probs = student.mass / student.total.unsqueeze(-1)
    logits = teacher.logits.sub_(teacher.log_z.unsqueeze(-1))
    distance, slope = dv.divergence_and_slope(logps, logits, probs, alpha=settings.alpha)
    base = -slope.sum(-1)
    return Teaching(distance, credit, base=base, slope=slope.mul_(student.total.unsqueeze(-1)))


def _reverse_kl(student: _Student, teacher: _Teacher) -> Teaching:
    """KL(S||T) over the vocabulary, in the memory of the teacher's logits (n, V).

    With d = shifted - logits of the teacher, and m the mean of d under the student, log p - log q is d plus a constant
    c of the token; so the divergence is m + c, and its gradient p (d - m).
    """
    logits = teacher.logits.clamp_(min=LOWEST)
    weighted = torch.sub(student.shifted, logits, out=logits).mul_(student.mass)
    mean = weighted.sum(-1) / student.total
    divergence = mean + teacher.log_z - student.log_total
    return Teaching(divergence, teacher.credit, base=-mean, slope=weighted)


def _teach_topk(student: _Student, taught: Sequence[Taught], settings: ObjectiveSettings, room: Room) -> Teaching:
    """The student's top k (paper, eq. 11), with the rest as one bucket or renormalized."""
    assert settings.topk is not None
    support = top_ids(student.shifted, settings.topk)
    mine, credit = student.at(support), None
    if settings.add_tail:
        teacher = _Teacher(taught, student, settings.temperature, room)
        credit, log_z = teacher.credit, teacher.log_z
        tail = dv.tail_logp(teacher.logits, support, log_normalizer=log_z)
        theirs = dv.with_tail(teacher.logits.gather(-1, support) - log_z.unsqueeze(-1), tail)
        mine = dv.with_tail(mine, dv.tail_logp(student.shifted, support, log_normalizer=student.log_total))
    else:
        theirs = dv.renormalize(_mix_columns(taught, support, settings.temperature, room))
        mine = dv.renormalize(mine)
    return _on_support(support, mine, theirs, credit, settings)


def _teach_served(student: _Student, served: ServedValues, settings: ObjectiveSettings) -> Teaching:
    """The sampled token, or the support on which a teacher was scored elsewhere; the same losses on it."""
    credit = served.logps - student.logps
    if settings.mode == "sampled_token":
        return Teaching(-credit, credit, base=credit, support=student.ids.unsqueeze(-1), extra=-credit.unsqueeze(-1))
    mine, theirs = student.at(served.ids), served.support_logps
    if settings.add_tail:
        theirs = dv.with_tail(theirs, dv.rest_logp(theirs))
        mine = dv.with_tail(mine, dv.tail_logp(student.shifted, served.ids, log_normalizer=student.log_total))
    else:
        mine, theirs = dv.renormalize(mine), dv.renormalize(theirs)
    return _on_support(served.ids, mine, theirs, credit, settings)


def _on_support(
    support: Tensor, mine: Tensor, theirs: Tensor, credit: Tensor | None, settings: ObjectiveSettings
) -> Teaching:
    """Divergence of two aligned log-probs on a support (n, K), or (n, K + 1) with a bucket for the rest."""
    probs = mine.exp()
    distance, slope = dv.divergence_and_slope(mine, theirs, probs, alpha=settings.alpha)
    mean = slope.sum(-1, keepdim=True)
    extra = slope - probs * mean
    if not settings.add_tail:
        return Teaching(distance, None, support=support, extra=extra)
    base = torch.where(probs[:, -1] > 0, slope[:, -1] / probs[:, -1] - mean.squeeze(-1), 0.0)
    return Teaching(distance, credit, base, support, extra[:, :-1] - probs[:, :-1] * base.unsqueeze(-1))


def likeliest(
    logits: Tensor, ids: Tensor, taught: TeacherInput, settings: ObjectiveSettings, *, number: int, room: Room
) -> Likeliest:
    """The `number` likeliest tokens of student and teacher for a chunk. Takes the memory of `logits` (n, V)."""
    number = min(number, logits.shape[-1])
    student = _Student(logits, ids, room)
    mine = top_ids(student.shifted, number)
    own = mine, student.at(mine)
    if isinstance(taught, ServedValues):
        logps, theirs = taught.support_logps.sort(-1, descending=True)
        return Likeliest(
            *own, taught.ids.gather(-1, theirs)[:, :number], logps[:, :number], taught.logps - student.logps
        )
    teacher = _Teacher(taught, student, settings.temperature, room)
    theirs = top_ids(teacher.logits, number)
    logps = teacher.logits.gather(-1, theirs) - teacher.log_z.unsqueeze(-1)
    return Likeliest(*own, theirs, logps, teacher.credit)


def top_ids(values: Tensor, k: int, *, num_groups: int = 2048) -> Tensor:
    """(n, k) ids of the k largest of `values` (n, V), as `topk` finds them, looking for them in few columns only.

    The columns are dealt out into groups. The k largest numbers lie in the k groups whose largest are largest: in any
    other group, no number is larger than the k largest of those. What is left over by the dealing is a candidate too.
    """
    num_groups = max(num_groups, 4 * k)
    size = values.shape[-1] // num_groups
    if size < 4:
        return values.topk(k, dim=-1).indices
    dealt = values[:, : size * num_groups].view(-1, size, num_groups)
    groups = dealt.amax(1).topk(k, dim=-1, sorted=False).indices
    steps = torch.arange(size, device=values.device) * num_groups
    rest = torch.arange(size * num_groups, values.shape[-1], device=values.device)
    candidates = torch.cat([(groups.unsqueeze(-1) + steps).flatten(1), rest.expand(len(values), -1)], dim=1)
    return candidates.gather(-1, values.gather(-1, candidates).topk(k, dim=-1).indices)


def _mix(taught: Sequence[Taught], temperature: float, room: Room) -> Tensor:
    """(n, V) sum of share * logits / temperature of the teacher's parts."""
    first, *others = taught
    logits = first.head.logits(first.hidden, temperature, out=room.take("teacher", len(first.hidden)))
    if others:
        logits = logits.mul_(first.share)
        for part in others:
            more = part.head.logits(part.hidden, temperature, out=room.take("scratch", len(part.hidden)))
            logits.add_(more, alpha=part.share)
    return logits


def _mix_columns(taught: Sequence[Taught], support: Tensor, temperature: float, room: Room) -> Tensor:
    """(n, K) entries of `_mix` at `support`; only those columns are computed where every head is one matrix."""
    if not all(part.head.is_plain for part in taught):
        return _mix(taught, temperature, room).gather(-1, support)
    mixed = torch.zeros_like(support, dtype=torch.float32)
    for part in taught:
        weight, bias = part.head.module.weight, part.head.module.bias
        for rows in rows_that_fit(support, weight):
            columns = support[rows]
            logits = torch.einsum("nkh,nh->nk", weight[columns], part.hidden[rows].to(weight.dtype))
            logits = logits if bias is None else logits + bias[columns]
            mixed[rows] += part.head.after.apply(logits, part.head.number).float() * (part.share / temperature)
    return mixed


def rows_that_fit(support: Tensor, weight: Tensor) -> list[slice]:
    """Cuts of N rows for which (rows, K, H) stays within a chunk."""
    limit = CPU_CHUNK if weight.device.type == "cpu" else DEVICE_CHUNK
    step = max(1, limit // (support.shape[1] * weight.shape[1]))
    return [slice(start, start + step) for start in range(0, len(support), step)]


def _gather(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
