"""Chunks of tokens: what is computed from logits that a one-column head is made to give."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import plain
import pytest
import torch
from plain import SETTINGS
from torch import Tensor, nn

from sdpo.chunk import Chunk, Room, Taught, top_ids
from sdpo.heads import Head
from sdpo.types import ObjectiveSettings

LN2 = math.log(2)
NOTHING = -math.inf
SAMPLED_TOKEN = replace(SETTINGS, mode="sampled_token")


def head_of(logits: Tensor) -> Head:
    """A head that gives `logits` (V,) for the hidden state (1.0,)."""
    module = nn.Linear(1, len(logits), bias=False)
    module.weight = nn.Parameter(logits.unsqueeze(-1))
    return Head(module)


@torch.no_grad()
def chunk_of(student: Tensor, teacher: Tensor, ids: Tensor, settings: ObjectiveSettings = SAMPLED_TOKEN) -> Chunk:
    """The sampled tokens `ids` (n,), each with the same logits (V,) of student and of teacher."""
    head, hidden = head_of(student), torch.ones(len(ids), 1)
    taught = [Taught(head_of(teacher), 1.0, hidden)]
    return Chunk(head.logits(hidden, 1.0), ids, taught, settings, head=head, room=Room(len(ids), head, hidden.device))


def gradient_of(chunk: Chunk) -> Tensor:
    """(n, V) gradient of each token's divergence with respect to its own logits."""
    return chunk.gradient(None, torch.ones(len(chunk.student.ids)))


def random_logits(seed: int, *shape: int) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Any, *, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=0, atol=atol)


# --- the sampled token -----------------------------------------------------------------------------------------------


def test_sampled_token_has_the_log_ratio_as_value_and_as_factor_of_the_gradient():
    # ln(0.8 / 0.2) = 2 ln 2; ln(0.2 / 0.8) = -2 ln 2. d log s_i = e_i - s: (0.2, -0.2) and (-0.8, 0.8)
    student, teacher = torch.tensor([0.8, 0.2]).log() + 3, torch.tensor([0.2, 0.8]).log() - 1
    chunk = chunk_of(student, teacher, torch.tensor([0, 1]))
    close(chunk.values.divergence, [2 * LN2, -2 * LN2])
    close(chunk.values.credit, [-2 * LN2, 2 * LN2])
    close(gradient_of(chunk), [[0.4 * LN2, -0.4 * LN2], [1.6 * LN2, -1.6 * LN2]])


def test_expected_value_and_gradient_of_the_sampled_token_are_those_of_reverse_kl():
    student, teacher = random_logits(0, 5).requires_grad_(), random_logits(1, 5)
    p = student.softmax(-1)
    exact = plain.kl(p, teacher.softmax(-1))
    # The expectation over tokens drawn from the student, exactly: every token of the vocabulary, by its probability.
    chunk = chunk_of(student.detach(), teacher, torch.arange(5))
    close(p.detach() @ chunk.values.divergence, exact.detach())
    close(p.detach() @ gradient_of(chunk), torch.autograd.grad(exact, student)[0])


# --- the support -----------------------------------------------------------------------------------------------------


# 2048 groups of at least 4 begin at 8192; with k = 600 there are 2400 groups, which begin at 9600.
@pytest.mark.parametrize("size", [700, 8_191, 8_192, 8_193, 10_000, 32_771])
@pytest.mark.parametrize("k", [1, 7, 100, 600])
@pytest.mark.parametrize("kind", ["distinct", "tied", "constant", "mostly nothing", "one group", "at the end"])
def test_top_ids_are_those_of_the_largest(size: int, k: int, kind: str):
    values = random_logits(0, 3, size)
    if kind == "tied":
        values = values.round()
    elif kind == "constant":
        values.zero_()
    elif kind == "mostly nothing":
        values[values < values.topk(50).values[:, -1:]] = NOTHING
    elif kind == "one group":
        values[:, 5::2048] += 100
    elif kind == "at the end":
        values[:, -5:] += 100
    ids = top_ids(values, k)
    assert ids.shape == (3, k)
    assert all(len(row.unique()) == k for row in ids)
    assert torch.equal(values.gather(-1, ids), values.topk(k, dim=-1).values)


# --- outcomes without mass -------------------------------------------------------------------------------------------


MODES = [
    ("sampled_token", None, False, 1.0),
    *(("full_logits", None, False, alpha) for alpha in (0.0, 0.5, 1.0)),
    *(("topk_logits", k, tail, alpha) for k in (3, 7) for tail in (False, True) for alpha in (0.0, 0.5, 1.0)),
]
# The student's order is that of its ids: its top 3 are 6, 5, 4.
LACKS = [([], []), ([0], []), ([], [0]), ([], [5]), ([0], [0]), ([0], [5]), ([0, 1], [0, 5])]


@pytest.mark.parametrize(("mode", "topk", "add_tail", "alpha"), MODES)
@pytest.mark.parametrize(("student_lacks", "teacher_lacks"), LACKS)
def test_values_and_gradients_are_the_plain_ones_where_a_logit_is_minus_infinity(
    mode: Any, topk: Any, add_tail: bool, alpha: float, student_lacks: list[int], teacher_lacks: list[int]
):
    settings = replace(SETTINGS, mode=mode, topk=topk, add_tail=add_tail, alpha=alpha)
    student, teacher = random_logits(2, 7).sort().values, random_logits(3, 7)
    student[student_lacks], teacher[teacher_lacks] = NOTHING, NOTHING
    ids = torch.tensor([i for i in range(7) if i not in student_lacks])
    student.requires_grad_()

    def expect(ids: Tensor) -> Tensor:
        return plain.distillation(student.expand(len(ids), 7), teacher.expand(len(ids), 7), ids, settings)

    chunk = chunk_of(student.detach(), teacher, ids, settings)
    values, expected = chunk.values, expect(ids).detach()
    is_finite = expected.isfinite()
    assert not any(v.isnan().any() for v in values if v is not None)
    # An infinite distance may be a very large number; the plain estimate from the sampled token is NaN there.
    assert (values.divergence[~is_finite] > 1e20).all()
    close(values.divergence[is_finite], expected[is_finite])
    p = student.detach().softmax(-1)
    close(values.logps, p[ids].log())
    close(values.entropy, torch.special.entr(p).sum().expand(len(ids)))
    if is_finite.any():
        (grad,) = torch.autograd.grad(expect(ids[is_finite]).sum(), student)
        close(gradient_of(chunk)[is_finite].sum(0), grad)
