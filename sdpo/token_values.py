"""Hidden states of tokens to log-probs and divergences, a chunk at a time, and back: the only place that does it.

No tensor has more than a chunk of tokens times the vocabulary. The forward pass keeps what the backward pass needs by
token, or by token and support; the student's logits are computed again there. Where the gradient reaches only the
columns of a renormalized support, not even that: both normalizers cancel, and only those columns are touched.

Letters: N tokens, H hidden size, V vocabulary, K support.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sdpo.heads import Head
from sdpo.losses import divergence as dv
from sdpo.types import ObjectiveSettings

# Logits held at once, in numbers. On a CPU small enough for the allocator to use the same memory again and again; on
# other devices large enough to keep them busy.
CPU_CHUNK, DEVICE_CHUNK = 2**23, 2**26


class Taught(NamedTuple):
    """A part of the teacher: its head, its share of the logits, and its hidden states (N, H)."""

    head: Head
    share: float
    hidden: Tensor


class TokenValues(NamedTuple):
    """Each (N,), fp32: log-prob of the token, entropy, divergence and credit (both None without a teacher)."""

    logps: Tensor
    entropy: Tensor
    divergence: Tensor | None
    credit: Tensor | None


def chunk_size(head: Head, device: torch.device) -> int:
    """Tokens a chunk."""
    numbers = CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK
    vocabulary: int = head.module.weight.shape[0]
    return max(1, numbers // vocabulary)


def token_values(
    head: Head, hidden: Tensor, ids: Tensor, taught: Sequence[Taught], settings: ObjectiveSettings
) -> TokenValues:
    """Values of N tokens: `hidden` (N, H) predict `ids` (N,); without a teacher, log-prob and entropy only.

    Gradients reach the student's hidden states and head through `logps` and `divergence`. The credit is None where
    the teacher is read on a renormalized support alone.
    """
    size = chunk_size(head, hidden.device)
    if head.is_plain:
        values = _HeadValues.apply(
            hidden, head.module.weight, head.module.bias, ids, _Call(head, taught, settings, size)
        )
        return TokenValues(*values)
    number = max(1, -(-len(ids) // size))  # one empty chunk for no token: the graph stays whole
    hidden_of = [hidden, *(part.hidden for part in taught)]
    chunks = zip(ids.tensor_split(number), *(h.tensor_split(number) for h in hidden_of), strict=True)
    is_needed = torch.is_grad_enabled()

    def run(ids: Tensor, hidden: Tensor, *states: Tensor) -> tuple[Tensor | None, ...]:
        parts = [part._replace(hidden=h) for part, h in zip(taught, states, strict=True)]
        return tuple(_forward(head, hidden, ids, parts, settings)[0])

    outputs = [
        checkpoint(run, *chunk, use_reentrant=False, preserve_rng_state=False) if is_needed else run(*chunk)
        for chunk in chunks
    ]
    joined: Any = [_joined(list(column)) for column in zip(*outputs, strict=True)]
    return TokenValues(*joined)


class _Call(NamedTuple):
    """What does not change between the chunks of a call."""

    head: Head
    taught: Sequence[Taught]
    settings: ObjectiveSettings
    size: int


class _Kept(NamedTuple):
    """What the backward pass needs of a chunk, besides its inputs.

    log_z (n,): the student's log normalizer. With respect to the logits the divergence has the gradient p * base,
    plus extra at `support`: base (n,) or None for 0, extra and support (n, K). All None without a teacher, and in
    full-vocabulary mode, where the gradient is computed anew.
    """

    log_z: Tensor
    support: Tensor | None = None
    extra: Tensor | None = None
    base: Tensor | None = None


def _forward(
    head: Head, hidden: Tensor, ids: Tensor, taught: Sequence[Taught], settings: ObjectiveSettings
) -> tuple[TokenValues, _Kept]:
    """Values of a chunk, and what its backward pass needs."""
    logits = head.logits(hidden, settings.temperature)
    log_z = logits.logsumexp(-1)
    logps = _gather(logits, ids) - log_z
    with torch.no_grad():
        probs = (logits - log_z.unsqueeze(-1)).exp_()
        entropy = log_z - (probs * logits.clamp(min=torch.finfo(logits.dtype).min)).sum(-1)
    if not taught:
        return TokenValues(logps, entropy, None, None), _Kept(log_z)
    if settings.mode == "topk_logits":
        return _forward_topk(logits, log_z, logps, entropy, ids, taught, settings)
    with torch.no_grad():
        teacher_logits = _mix(taught, settings.temperature)
        teacher_log_z = teacher_logits.logsumexp(-1)
        teacher_logps = _gather(teacher_logits, ids) - teacher_log_z
        credit = teacher_logps - logps
    if settings.mode == "sampled_token":
        values = TokenValues(logps, entropy, dv.sampled_token_kl(logps, teacher_logps), credit)
        return values, _Kept(log_z, ids.unsqueeze(-1), -credit.unsqueeze(-1), credit)
    teacher = teacher_logits.sub_(teacher_log_z.unsqueeze(-1))
    distance = dv.divergence(logits - log_z.unsqueeze(-1), teacher, alpha=settings.alpha)
    return TokenValues(logps, entropy, distance, credit), _Kept(log_z)


def _forward_topk(
    logits: Tensor,
    log_z: Tensor,
    logps: Tensor,
    entropy: Tensor,
    ids: Tensor,
    taught: Sequence[Taught],
    settings: ObjectiveSettings,
) -> tuple[TokenValues, _Kept]:
    """The student's top k (paper, eq. 11), with the rest as one bucket or renormalized."""
    assert settings.topk is not None
    support = logits.detach().topk(settings.topk, dim=-1).indices
    student = logits.gather(-1, support) - log_z.unsqueeze(-1)
    credit = None
    with torch.no_grad():
        if settings.add_tail:
            teacher_logits = _mix(taught, settings.temperature)
            teacher_log_z = teacher_logits.logsumexp(-1)
            credit = _gather(teacher_logits, ids) - teacher_log_z - logps
            teacher = teacher_logits.gather(-1, support) - teacher_log_z.unsqueeze(-1)
            tail = dv.tail_logp(teacher_logits, support, log_normalizer=teacher_log_z)
            teacher = dv.with_tail(teacher, tail)
        else:
            teacher = dv.renormalize(_mix_columns(taught, support, settings.temperature))
    if settings.add_tail:
        student = dv.with_tail(student, dv.tail_logp(logits, support, log_normalizer=log_z))
    else:
        student = dv.renormalize(student)
    distance = dv.divergence(student, teacher, alpha=settings.alpha)
    with torch.no_grad():
        slope = dv.weighted_slope(student, teacher, alpha=settings.alpha)
        probs, mean = student.exp(), slope.sum(-1, keepdim=True)
        extra, base = slope - probs * mean, None
        if settings.add_tail:
            has_tail = probs[:, -1] > 0
            base = torch.where(has_tail, slope[:, -1] / probs[:, -1] - mean.squeeze(-1), 0.0)
            extra = extra[:, :-1] - probs[:, :-1] * base.unsqueeze(-1)
    return TokenValues(logps, entropy, distance, credit), _Kept(log_z, support, extra, base)


def _mix(taught: Sequence[Taught], temperature: float) -> Tensor:
    """(N, V) sum of share * logits / temperature of the teacher's parts."""
    first, *others = taught
    logits = first.head.logits(first.hidden, temperature)
    if not others:
        return logits
    logits = logits * first.share
    for part in others:
        logits.add_(part.head.logits(part.hidden, temperature), alpha=part.share)
    return logits


def _mix_columns(taught: Sequence[Taught], support: Tensor, temperature: float) -> Tensor:
    """(N, K) entries of `_mix` at `support`; only those columns are computed where every head is one matrix."""
    if not all(part.head.is_plain for part in taught):
        return _mix(taught, temperature).gather(-1, support)
    mixed = torch.zeros_like(support, dtype=torch.float32)
    for part in taught:
        weight, bias = part.head.module.weight, part.head.module.bias
        for rows in _rows_that_fit(support, weight):
            columns = support[rows]
            logits = torch.einsum("nkh,nh->nk", weight[columns], part.hidden[rows].to(weight.dtype))
            logits = logits if bias is None else logits + bias[columns]
            mixed[rows] += part.head.after.apply(logits, part.head.number).float() * (part.share / temperature)
    return mixed


def _rows_that_fit(support: Tensor, weight: Tensor) -> list[slice]:
    """Cuts of N rows for which (rows, K, H) stays within a chunk."""
    limit = CPU_CHUNK if weight.device.type == "cpu" else DEVICE_CHUNK
    step = max(1, limit // (support.shape[1] * weight.shape[1]))
    return [slice(start, start + step) for start in range(0, len(support), step)]


def _gather(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


class _HeadValues(torch.autograd.Function):
    """`token_values` of a head that is one matrix, with its gradients written down."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, call: _Call) -> Any:
        chunks = [
            _forward(call.head, hidden[rows], ids[rows], _part(call.taught, rows), call.settings)
            for rows in _slices(len(ids), call.size)
        ]
        values = [_joined([chunk[0][i] for chunk in chunks]) for i in range(4)]
        kept = [_joined([chunk[1][i] for chunk in chunks]) for i in range(4)]
        ctx.save_for_backward(hidden, weight, bias, ids, *kept)
        ctx.call = call
        device = hidden.device.type
        is_on = torch.is_autocast_enabled(device)
        ctx.autocast = torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=is_on)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(v for v in (values[1], values[3]) if v is not None))
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, of_logps: Tensor | None, _: Any, of_divergence: Tensor | None, __: Any) -> Any:
        hidden, weight, bias, ids, *kept = ctx.saved_tensors
        call: _Call = ctx.call
        gradients = _Gradients(hidden, weight, bias, needs_weight=ctx.needs_input_grad[1])
        is_sparse = of_logps is None and kept[1] is not None and kept[3] is None
        with ctx.autocast:
            for rows in _slices(len(ids), call.size):
                found: Any = [None if k is None else k[rows] for k in kept]
                mine = _Kept(*found)
                g_logps = None if of_logps is None else of_logps[rows]
                g_divergence = None if of_divergence is None else of_divergence[rows]
                if is_sparse and g_divergence is not None:
                    gradients.add_columns(rows, mine, g_divergence, call)
                elif g_logps is not None or g_divergence is not None:
                    parts = _part(call.taught, rows)
                    gradients.add(rows, _of_logits(hidden[rows], ids[rows], parts, mine, g_logps, g_divergence, call))
        return gradients.hidden, gradients.weight, gradients.bias, None, None


def _of_logits(
    hidden: Tensor,
    ids: Tensor,
    taught: Sequence[Taught],
    kept: _Kept,
    of_logps: Tensor | None,
    of_divergence: Tensor | None,
    call: _Call,
) -> Tensor:
    """(n, V) gradient with respect to the head's own output."""
    head, settings = call.head, call.settings
    logits = head.logits(hidden, settings.temperature)
    derivative = head.after.derivative(logits * settings.temperature, head.number)
    probs = logits.sub_(kept.log_z.unsqueeze(-1))  # log-probs, until exponentiated
    if of_divergence is not None and kept.support is None:
        teacher = _mix(taught, settings.temperature)
        teacher.sub_(teacher.logsumexp(-1, keepdim=True))
        slope = dv.weighted_slope(probs, teacher, alpha=settings.alpha)
        of_base = -slope.sum(-1) * of_divergence
        gradient = slope.mul_(of_divergence.unsqueeze(-1))
    else:
        of_base = torch.zeros_like(kept.log_z)
        gradient = None
        if of_divergence is not None and kept.base is not None:
            of_base = kept.base * of_divergence
    if of_logps is not None:
        of_base = of_base - of_logps
    probs = probs.exp_().mul_(of_base.unsqueeze(-1))
    gradient = probs if gradient is None else gradient.add_(probs)
    if of_divergence is not None and kept.support is not None and kept.extra is not None:
        gradient.scatter_add_(-1, kept.support, kept.extra * of_divergence.unsqueeze(-1))
    if of_logps is not None:
        gradient.scatter_add_(-1, ids.unsqueeze(-1), of_logps.unsqueeze(-1))
    if isinstance(derivative, Tensor):
        return gradient.mul_(derivative).div_(settings.temperature)
    factor = derivative / settings.temperature
    return gradient if factor == 1.0 else gradient.mul_(factor)


class _Gradients:
    """Gradients of hidden states, weight and bias, summed over chunks; in float32 where the weight is narrower."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, needs_weight: bool):
        self._states = hidden
        self._matrix = weight
        self.hidden = torch.zeros_like(hidden)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        self._bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs_weight else None

    @property
    def weight(self) -> Tensor | None:
        return None if self._weight is None else self._weight.to(self._matrix.dtype)

    @property
    def bias(self) -> Tensor | None:
        return None if self._bias is None else self._bias.to(self._matrix.dtype)

    def add(self, rows: slice, of_output: Tensor) -> None:
        """Adds a chunk, from the gradient (n, V) of the head's output."""
        narrow = of_output.to(self._matrix.dtype)
        states = self._states[rows].to(self._matrix.dtype)
        self.hidden[rows] = (narrow @ self._matrix).to(self.hidden.dtype)
        if self._weight is not None:
            if self._weight.dtype == narrow.dtype and not torch.is_autocast_enabled(narrow.device.type):
                self._weight.addmm_(narrow.T, states)
            else:
                self._weight.add_(narrow.T @ states)
        if self._bias is not None:
            self._bias.add_(of_output.sum(0))

    def add_columns(self, rows: slice, kept: _Kept, of_divergence: Tensor, call: _Call) -> None:
        """Adds a chunk whose gradient reaches only the columns of its support."""
        assert kept.support is not None and kept.extra is not None
        head, temperature = call.head, call.settings.temperature
        for part in _rows_that_fit(kept.support, self._matrix):
            inside = slice(rows.start + part.start, min(rows.start + part.stop, rows.stop))
            columns = kept.support[part]
            matrix, states = self._matrix[columns], self._states[inside].to(self._matrix.dtype)
            gradient = kept.extra[part] * of_divergence[part].unsqueeze(-1) / temperature
            output = head.after.apply(torch.einsum("nkh,nh->nk", matrix, states), head.number)
            gradient = (gradient * head.after.derivative(output, head.number)).to(matrix.dtype)
            self.hidden[inside] = torch.einsum("nk,nkh->nh", gradient, matrix).to(self.hidden.dtype)
            if self._weight is not None:
                outer = gradient.unsqueeze(-1) * states.unsqueeze(1)
                self._weight.index_add_(0, columns.flatten(), outer.flatten(0, 1).to(self._weight.dtype))
            if self._bias is not None:
                self._bias.index_add_(0, columns.flatten(), gradient.flatten().to(self._bias.dtype))


def _slices(number: int, size: int) -> list[slice]:
    """Cuts of `number` tokens; an empty one for none, so that empty inputs give empty outputs."""
    return [slice(start, min(start + size, number)) for start in range(0, number, size)] or [slice(0, 0)]


def _part(taught: Sequence[Taught], rows: slice) -> list[Taught]:
    return [part._replace(hidden=part.hidden[rows]) for part in taught]


def _joined(pieces: list[Tensor | None]) -> Tensor | None:
    return None if pieces[0] is None else torch.cat([piece for piece in pieces if piece is not None])
