"""Hidden states of tokens to values and gradients, a chunk at a time: the only place that does it.

No tensor has more than a chunk of tokens times the vocabulary, and no logits are computed twice: a chunk's values are
followed at once by the gradient of the loss with respect to its logits, and by what that adds to the gradients of
hidden states and head. So the loss has to say what it makes of a chunk before it has seen the others (`Slopes`). The
backward pass only scales what is there. Where the gradient reaches only the columns of a renormalized support, both
normalizers cancel, and only those columns are touched.

Letters: N tokens, n tokens of a chunk, H hidden size, V vocabulary, K support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sdpo.chunk import (
    Chunk,
    Likeliest,
    Room,
    ServedValues,
    TeacherInput,
    TokenValues,
    chunk_size,
    likeliest,
    rows_that_fit,
    top_ids,
)
from sdpo.heads import Head
from sdpo.types import ObjectiveSettings

Slopes = Callable[[slice, TokenValues], tuple[Tensor | None, Tensor | None]]
"""Of the tokens `slice` and their values: d loss / d logps and d loss / d divergence, each (n,), None for 0."""


def token_values(
    head: Head,
    hidden: Tensor,
    ids: Tensor,
    taught: TeacherInput,
    settings: ObjectiveSettings,
    *,
    slopes: Slopes | None = None,
) -> tuple[TokenValues, Tensor]:
    """Values of N tokens, and a 0 (0-dim) that carries the gradient which `slopes` describes; none without it.

    `hidden` (N, H) predict `ids` (N,). Without a teacher, log-prob and entropy only. The credit is None where the
    teacher is read on a renormalized support alone.
    """
    slopes = slopes if torch.is_grad_enabled() else None
    call = _Call(head, ids, taught, settings, slopes)
    if slopes is None:
        found = _Found(len(ids), hidden.device)
        with torch.no_grad():
            for rows, chunk, _ in _chunks(hidden, call):
                found.put(rows, chunk.values)
        return found.values, hidden.new_zeros(())
    parameters = [parameter for parameter in head.module.parameters() if parameter.requires_grad]
    *values, anchor = _HeadLoss.apply(hidden, call, *parameters)
    return TokenValues(*values), anchor


@torch.no_grad()
def top_support(head: Head, hidden: Tensor, k: int) -> Tensor:
    """(N, K) ids of the k likeliest tokens after the hidden states (N, H)."""
    return torch.cat([top_ids(head.logits(part, 1.0), k) for part in hidden.split(chunk_size(head, hidden.device))])


@torch.no_grad()
def likeliest_tokens(
    head: Head, hidden: Tensor, ids: Tensor, taught: TeacherInput, settings: ObjectiveSettings, *, number: int
) -> Likeliest:
    """The `number` likeliest tokens of student and teacher for N tokens, which takes both heads once more."""
    size = min(chunk_size(head, hidden.device), len(ids))
    room, found = Room(size, head, hidden.device), []
    for start in range(0, max(len(ids), 1), max(size, 1)):
        rows = slice(start, min(start + size, len(ids)))
        logits = head.logits(hidden[rows], settings.temperature, out=room.take("logits", rows.stop - start))
        found.append(likeliest(logits, ids[rows], _rows_of(taught, rows), settings, number=number, room=room))
    return Likeliest(*(torch.cat(parts) for parts in zip(*found, strict=True)))


class _Call(NamedTuple):
    """What does not change between the chunks of a call."""

    head: Head
    ids: Tensor
    taught: TeacherInput
    settings: ObjectiveSettings
    slopes: Slopes | None


class _HeadLoss(torch.autograd.Function):
    """Values of all tokens, and the anchor: 0, with the gradient of the loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, call: _Call, *parameters: nn.Parameter) -> Any:
        assert call.slopes is not None
        is_plain = call.head.is_plain
        gradients: _Gradients = (_Gradients if is_plain else _TracedGradients)(hidden, call.head, parameters)
        found = _Found(len(call.ids), hidden.device)
        for rows, chunk, traced in _chunks(hidden, call, is_traced=not is_plain):
            found.put(rows, chunk.values)
            of_logps, of_divergence = call.slopes(rows, chunk.values)
            if is_plain and of_divergence is not None and of_logps is None and chunk.is_sparse:
                gradients.add_columns(rows, chunk, of_divergence)
            elif of_logps is not None or of_divergence is not None:
                gradients.add(rows, chunk.gradient(of_logps, of_divergence), traced)
        gradients.finish()
        ctx.save_for_backward(gradients.hidden, *gradients.parameters)
        ctx.dtypes = [hidden.dtype, *(parameter.dtype for parameter in parameters)]
        ctx.mark_non_differentiable(*(value for value in found.values if value is not None))
        ctx.set_materialize_grads(False)
        return (*found.values, hidden.new_zeros((), dtype=torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor | None) -> Any:
        scale = of_outputs[-1]
        if scale is None:
            return (None,) * (1 + len(ctx.dtypes))
        # In place: a copy of the head's gradient would be the largest tensor of the step.
        scaled = [g.mul_(scale).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return scaled[0], None, *scaled[1:]


class _Found:
    """Values of all tokens, in memory taken at the start: small tensors made between large ones keep those' memory."""

    def __init__(self, number: int, device: torch.device):
        self._room = [torch.empty(number, device=device) for _ in TokenValues._fields]
        self.values = TokenValues(self._room[0], self._room[1], None, None)

    def put(self, rows: slice, values: TokenValues) -> None:
        for room, value in zip(self._room, values, strict=True):
            if value is not None:
                room[rows] = value
        present: Any = [None if v is None else room for v, room in zip(values, self._room, strict=True)]
        self.values = TokenValues(*present)


class _Traced(NamedTuple):
    """A chunk's hidden states and logits on a graph of their own, for a head that is more than one matrix."""

    hidden: Tensor
    logits: Tensor


def _chunks(hidden: Tensor, call: _Call, *, is_traced: bool = False) -> Iterator[tuple[slice, Chunk, _Traced | None]]:
    """(rows, chunk, traced or None) of each cut of the tokens; an empty one for none, so that values have a shape.

    A chunk is to be done with before the next one is asked for.
    """
    size, number, temperature = chunk_size(call.head, hidden.device), len(call.ids), call.settings.temperature
    room = Room(min(size, number), call.head, hidden.device)
    for start in range(0, max(number, 1), size):
        rows = slice(start, min(start + size, number))
        taught = _rows_of(call.taught, rows)
        traced, out = None, room.take("logits", rows.stop - start)
        if is_traced:
            with torch.enable_grad():
                states = hidden[rows].detach().requires_grad_()
                traced = _Traced(states, call.head.logits(states, temperature))
            logits = out.copy_(traced.logits.detach())
        else:
            logits = call.head.logits(hidden[rows], temperature, out=out)
        chunk = Chunk(logits, call.ids[rows], taught, call.settings, head=call.head, room=room)
        yield rows, chunk, traced


def _rows_of(taught: TeacherInput, rows: slice) -> TeacherInput:
    if isinstance(taught, ServedValues):
        return ServedValues(*(value[rows] for value in taught))
    return [part._replace(hidden=part.hidden[rows]) for part in taught]


class _Gradients:
    """Gradients of hidden states (N, H) and of a head that is one matrix, in at least fp32."""

    def __init__(self, hidden: Tensor, head: Head, parameters: Sequence[nn.Parameter]):
        self.head = head
        self._states = hidden
        self.hidden = torch.zeros_like(hidden, dtype=_wide(hidden))
        self.parameters = [torch.empty_like(p, dtype=_wide(p)) for p in parameters]
        self._is_empty = True  # until the first chunk, which writes what the others add to
        module = head.module
        by_name = {id(p): g for p, g in zip(parameters, self.parameters, strict=True)}
        self._matrix = module.weight
        self._weight, self._bias = by_name.get(id(module.weight)), by_name.get(id(module.bias))

    def add(self, rows: slice, of_output: Tensor, traced: _Traced | None) -> None:
        """Adds a chunk, from the gradient (n, V) of the head's output."""
        dtype = _product_dtype(self._matrix)
        (narrow, scale), states = _narrow(of_output, dtype), self._states[rows].to(dtype)
        self.hidden[rows] = (narrow @ self._matrix).to(self.hidden.dtype) * scale
        if self._weight is not None:
            _add_product(self._weight, narrow.T, states, scale=scale, is_first=self._is_empty)
        if self._bias is not None:
            self._bias.copy_(of_output.sum(0)) if self._is_empty else self._bias.add_(of_output.sum(0))
        self._is_empty = False

    def finish(self) -> None:
        """Zeros where no chunk has written."""
        if self._is_empty:
            for gradient in self.parameters:
                gradient.zero_()
            self._is_empty = False

    def add_columns(self, rows: slice, chunk: Chunk, of_divergence: Tensor) -> None:
        """Adds a chunk whose gradient reaches only the columns of its support."""
        teaching, head = chunk.teaching, self.head
        assert teaching is not None and teaching.support is not None and teaching.extra is not None
        self.finish()
        of_logits = teaching.extra * of_divergence.unsqueeze(-1) / chunk.temperature
        for part in rows_that_fit(teaching.support, self._matrix):
            inside = slice(rows.start + part.start, min(rows.start + part.stop, rows.stop))
            columns = teaching.support[part]
            matrix, states = self._matrix[columns], self._states[inside].to(self._matrix.dtype)
            output = head.after.apply(torch.einsum("nkh,nh->nk", matrix, states), head.number)
            wide = of_logits[part] * head.after.derivative(output, head.number)
            gradient, scale = _narrow(wide, _product_dtype(matrix))
            self.hidden[inside] = torch.einsum("nk,nkh->nh", gradient, matrix).to(self.hidden.dtype) * scale
            if self._weight is not None:
                outer = wide.to(self._weight.dtype).unsqueeze(-1) * states.unsqueeze(1)
                self._weight.index_add_(0, columns.flatten(), outer.flatten(0, 1))
            if self._bias is not None:
                self._bias.index_add_(0, columns.flatten(), wide.flatten().to(self._bias.dtype))


class _TracedGradients(_Gradients):
    """Of hidden states (N, H) and of the trained parameters of any head, through a graph of each chunk."""

    def __init__(self, hidden: Tensor, head: Head, parameters: Sequence[nn.Parameter]):
        self.hidden = torch.zeros_like(hidden, dtype=_wide(hidden))
        self.parameters = [torch.zeros_like(p, dtype=_wide(p)) for p in parameters]
        self._leaves, self._is_empty = list(parameters), False

    def add(self, rows: slice, of_output: Tensor, traced: _Traced | None) -> None:
        assert traced is not None
        narrow, scale = _narrow(of_output, _product_dtype(traced.hidden))
        found = torch.autograd.grad(traced.logits, [traced.hidden, *self._leaves], narrow.to(of_output.dtype))
        self.hidden[rows] = found[0].to(self.hidden.dtype) * scale
        for total, gradient in zip(self.parameters, found[1:], strict=True):
            total.add_(gradient.to(total.dtype) * scale)


def _product_dtype(factor: Tensor) -> torch.dtype:
    """What a matrix product with `factor` is computed in."""
    device = factor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else factor.dtype


def _narrow(gradient: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | float]:
    """The gradient in `dtype`, and the number to multiply what is made of it by.

    float16 is divided by the largest entry: a mean over many tokens has gradients below its smallest number, and a
    scaler of the loss multiplies in the backward pass, which is too late here.
    """
    if dtype != torch.float16 or not gradient.numel():
        return gradient.to(dtype), 1.0
    scale = gradient.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    return (gradient / scale).to(dtype), scale


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, scale: Tensor | float, is_first: bool) -> None:
    """total (+)= scale * left @ right, in fp32: products rounded to half precision chunk by chunk add up a bias."""
    with torch.autocast(total.device.type, enabled=False):
        if total.device.type == "cuda" and left.dtype == torch.bfloat16:
            if is_first:
                total.zero_()
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        else:
            total.addmm_(left.to(total.dtype), right.to(total.dtype) * scale, beta=0.0 if is_first else 1.0)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
