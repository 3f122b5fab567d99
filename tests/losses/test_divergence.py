"""Divergences are what their formulas say: worked values, analytic gradients, limits, and what must have no effect."""

import math
from functools import partial
from typing import Any

import plain
import pytest
import torch
from torch import Tensor

from sdpo.losses.divergence import (
    divergence_and_slope,
    importance_weight,
    masked,
    renormalize,
    rest_logp,
    tail_logp,
    with_tail,
)

LN2, LN3 = math.log(2), math.log(3)
ALPHAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def logs(*probs: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Log-probs (K,); a zero becomes -inf."""
    return torch.tensor(probs, dtype=dtype).log()


def random_logits(seed: int, *shape: int, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Student logits, on a leaf with gradient, and teacher logits, both fp64."""
    generator = torch.Generator().manual_seed(seed)
    student = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    teacher = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    return student.requires_grad_(), teacher


def close(actual: Tensor, expected: float | Tensor, *, atol: float = 1e-12) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected.expand_as(actual), rtol=0, atol=atol)


class _Divergence(torch.autograd.Function):
    """The divergence (...), with the slope (..., K) as its gradient with respect to the student's log-probs."""

    @staticmethod
    def forward(ctx: Any, student_logps: Tensor, teacher_logps: Tensor, alpha: float) -> Tensor:
        student_probs = student_logps.to(torch.promote_types(student_logps.dtype, torch.float32)).exp()
        value, slope = divergence_and_slope(student_logps, teacher_logps, student_probs, alpha=alpha)
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * gradient.unsqueeze(-1), None, None


def divergence(student_logps: Tensor, teacher_logps: Tensor, *, alpha: float) -> Tensor:
    """Divergence (...) of log-probs (..., K), whose gradient is right where the student's come out of a softmax.

    The softmax takes away the multiple of p that the slope is free in.
    """
    return _Divergence.apply(student_logps, teacher_logps, alpha)


forward_kl, reverse_kl, jensen_shannon = partial(divergence, alpha=0.0), partial(divergence, alpha=1.0), divergence


# --- values ----------------------------------------------------------------------------------------------------------


def test_forward_kl_of_two_outcomes():
    # S = (1/4, 3/4), T = (1/2, 1/2): 1/2 ln 2 + 1/2 ln(2/3) = ln 2 - 1/2 ln 3
    close(forward_kl(logs(0.25, 0.75), logs(0.5, 0.5)), LN2 - 0.5 * LN3)


def test_reverse_kl_of_two_outcomes():
    # S = (1/4, 3/4), T = (1/2, 1/2): 1/4 ln(1/2) + 3/4 ln(3/2) = 3/4 ln 3 - ln 2
    close(reverse_kl(logs(0.25, 0.75), logs(0.5, 0.5)), 0.75 * LN3 - LN2)


def test_jensen_shannon_of_disjoint_outcomes_is_the_entropy_of_the_coin():
    # S = (1, 0), T = (0, 1), a = 1/4: M = (3/4, 1/4), D = 3/4 ln(4/3) + 1/4 ln 4
    expected = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    close(jensen_shannon(logs(1, 0), logs(0, 1), alpha=0.25), expected)


def test_jensen_shannon_of_two_outcomes():
    # S = (1/4, 3/4), T = (3/4, 1/4), a = 1/2: M = (1/2, 1/2), KL(S||M) = KL(T||M) = 1/4 ln(1/2) + 3/4 ln(3/2)
    close(jensen_shannon(logs(0.25, 0.75), logs(0.75, 0.25), alpha=0.5), 0.75 * LN3 - LN2)


def test_jensen_shannon_weighs_each_side_by_its_own_share():
    # S = (1, 0), T = (1/2, 1/2), a = 1/4: M = (7/8, 1/8).
    # KL(S||M) = ln(8/7); KL(T||M) = 1/2 ln(4/7) + 1/2 ln 4 = 1/2 ln(16/7)
    expected = 0.75 * math.log(8 / 7) + 0.25 * 0.5 * math.log(16 / 7)
    close(jensen_shannon(logs(1, 0), logs(0.5, 0.5), alpha=0.25), expected)


def test_jensen_shannon_at_one_half_is_symmetric():
    student, teacher = logs(0.1, 0.2, 0.7), logs(0.5, 0.4, 0.1)
    close(jensen_shannon(student, teacher, alpha=0.5), jensen_shannon(teacher, student, alpha=0.5))


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_jensen_shannon_never_exceeds_the_entropy_of_a_coin_of_bias_alpha(alpha: float):
    student, teacher = random_logits(0, 200, 5, spread=20.0)
    value = jensen_shannon(student.log_softmax(-1), teacher.log_softmax(-1), alpha=alpha)
    bound = -alpha * math.log(alpha) - (1 - alpha) * math.log(1 - alpha)
    assert bound <= LN2
    assert value.min() >= -1e-12
    assert value.max() <= bound + 1e-12
    assert value.max() > 0.99 * bound  # near-disjoint rows come close to it


def test_jensen_shannon_over_alpha_tends_to_forward_kl():
    # The weighted sum itself tends to 0 at both ends; D / a = KL(T||S) + O(a).
    student, teacher = logs(0.1, 0.2, 0.7), logs(0.5, 0.4, 0.1)
    alpha = 1e-6
    close(jensen_shannon(student, teacher, alpha=alpha) / alpha, forward_kl(student, teacher), atol=1e-5)
    close(jensen_shannon(student, teacher, alpha=alpha), 0.0, atol=1e-5)


def test_jensen_shannon_over_one_minus_alpha_tends_to_reverse_kl():
    student, teacher = logs(0.1, 0.2, 0.7), logs(0.5, 0.4, 0.1)
    alpha = 1 - 1e-6
    close(jensen_shannon(student, teacher, alpha=alpha) / (1 - alpha), reverse_kl(student, teacher), atol=1e-5)
    close(jensen_shannon(student, teacher, alpha=alpha), 0.0, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(
    ("student_lacks", "teacher_lacks"), [([], []), ([2], []), ([], [2]), ([2], [2]), ([2], [3]), ([1, 2, 5], [2, 5])]
)
def test_values_and_gradients_are_those_of_the_plain_formulas(
    alpha: float, student_lacks: list[int], teacher_lacks: list[int]
):
    student, teacher = random_logits(14, 4, 7)
    student = student.detach().index_fill(-1, torch.tensor(student_lacks, dtype=torch.long), -math.inf)
    teacher = teacher.index_fill(-1, torch.tensor(teacher_lacks, dtype=torch.long), -math.inf)
    student.requires_grad_()
    value = divergence(student.log_softmax(-1), teacher.log_softmax(-1), alpha=alpha)
    expected = plain.divergence(student.softmax(-1), teacher.softmax(-1), alpha=alpha)
    close(value, expected)
    # where KL(P||Q) meets mass of P that Q lacks
    lonely = {0.0: set(student_lacks) - set(teacher_lacks), 1.0: set(teacher_lacks) - set(student_lacks)}
    if lonely.get(alpha):
        assert (value == math.inf).all()
    else:
        (grad,) = torch.autograd.grad(value.sum(), student)
        close(grad, torch.autograd.grad(expected.sum(), student)[0])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_divergence_of_equal_distributions_is_zero_with_zero_gradient(alpha: float):
    student, _ = random_logits(1, 3, 5)
    value = divergence(student.log_softmax(-1), student.detach().log_softmax(-1), alpha=alpha)
    close(value, 0.0)
    close(torch.autograd.grad(value.sum(), student)[0], 0.0)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_one_value_per_token_whatever_the_leading_dimensions(alpha: float):
    student, teacher = (x.log_softmax(-1) for x in random_logits(2, 2, 3, 5))
    value = divergence(student, teacher, alpha=alpha)
    assert value.shape == (2, 3)
    close(value[1, 2], divergence(student[1, 2], teacher[1, 2], alpha=alpha))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_half_precision_is_computed_in_fp32(alpha: float):
    student, teacher = (x.log_softmax(-1).bfloat16() for x in random_logits(3, 4, 50))
    value = divergence(student, teacher, alpha=alpha)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, divergence(student.float(), teacher.float(), alpha=alpha), rtol=0, atol=0)


def test_a_teacher_over_another_support_is_refused_not_broadcast():
    with pytest.raises(AssertionError):
        forward_kl(logs(0.5, 0.5).expand(3, 2), logs(0.5, 0.5))


# --- gradients -------------------------------------------------------------------------------------------------------


def test_gradient_of_forward_kl_is_student_minus_teacher():
    student, teacher = random_logits(4, 3, 5)
    (grad,) = torch.autograd.grad(forward_kl(student.log_softmax(-1), teacher.log_softmax(-1)).sum(), student)
    close(grad, student.softmax(-1) - teacher.softmax(-1))


def test_gradient_of_reverse_kl_is_the_centered_log_ratio_weighted_by_the_student():
    student, teacher = random_logits(5, 3, 5)
    value = reverse_kl(student.log_softmax(-1), teacher.log_softmax(-1))
    (grad,) = torch.autograd.grad(value.sum(), student)
    log_ratio = student.log_softmax(-1) - teacher.log_softmax(-1)
    close(grad, student.softmax(-1) * (log_ratio - value.unsqueeze(-1)))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradient_agrees_with_finite_differences(alpha: float):
    student, teacher = random_logits(6, 3, 5)

    def value(logits: Tensor) -> Tensor:
        return divergence(logits.log_softmax(-1), teacher.log_softmax(-1), alpha=alpha)

    assert torch.autograd.gradcheck(value, student)


@pytest.mark.parametrize("has_tail", [False, True])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradient_on_the_top_k_agrees_with_finite_differences(alpha: float, has_tail: bool):
    student, teacher = random_logits(7, 3, 6)
    support = student.topk(2).indices

    def view(logits: Tensor) -> Tensor:
        top = logits.log_softmax(-1).gather(-1, support)
        return with_tail(top, tail_logp(logits, support)) if has_tail else renormalize(top)

    assert torch.autograd.gradcheck(lambda x: divergence(view(x), view(teacher), alpha=alpha), student)


def test_the_slope_of_the_reverse_kl_on_two_outcomes_by_hand():
    # p = (0.75, 0.25), q = (0.5, 0.5): 0.75 ln 1.5 = 0.304099, 0.25 ln 0.5 = -0.173287; their sum is the divergence
    student, teacher = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    value, slope = divergence_and_slope(student.log(), teacher.log(), student, alpha=1.0)
    close(slope, torch.tensor([0.304099, -0.173287]), atol=1e-6)
    close(value, 0.130812, atol=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_gradient_reaches_the_teacher(alpha: float):
    student, teacher = random_logits(9, 3, 5)
    student = student.detach().log_softmax(-1)
    teacher.requires_grad_()
    value, slope = divergence_and_slope(student, teacher.log_softmax(-1), student.exp(), alpha=alpha)
    assert not value.requires_grad
    assert not slope.requires_grad


# --- supports --------------------------------------------------------------------------------------------------------


def test_renormalized_top_k_sums_to_one_and_keeps_ratios():
    # (0.6, 0.2) of a vocabulary of four: 0.6 / 0.8 and 0.2 / 0.8
    close(renormalize(logs(0.6, 0.2)).exp(), torch.tensor([0.75, 0.25], dtype=torch.float64))


def test_tail_is_the_mass_outside_the_support():
    # softmax of these logits is (0.1, 0.2, 0.3, 0.4); outside ids (3, 1) are 0.1 + 0.3
    logits = logs(0.1, 0.2, 0.3, 0.4).add(5.0).unsqueeze(0)
    ids = torch.tensor([[3, 1]])
    close(tail_logp(logits, ids).exp(), 0.4)
    close(tail_logp(logits, ids, log_normalizer=torch.tensor([5.0], dtype=torch.float64)).exp(), 0.4)
    full = with_tail(logits.log_softmax(-1).gather(-1, ids), tail_logp(logits, ids))
    close(full.exp(), torch.tensor([[0.4, 0.2, 0.4]], dtype=torch.float64))


def test_tail_of_bf16_logits_is_computed_in_fp32():
    logits = torch.tensor([[2.0, 1.0, 0.5]], dtype=torch.bfloat16)
    ids = torch.tensor([[0]])
    assert tail_logp(logits, ids).dtype == torch.float32
    assert torch.equal(tail_logp(logits, ids), tail_logp(logits.float(), ids))


def test_tail_in_fp32_is_accurate_at_minus_59_nats_where_log_of_one_minus_p_is_not():
    logits, ids = torch.tensor([[59.0, 0.0]]), torch.tensor([[0]])
    # ln(1 / (1 + e^59)) = -59 - e^-59
    close(tail_logp(logits, ids), -59.0, atol=1e-5)
    p = logits.log_softmax(-1)[:, 0].exp()
    assert torch.log(1 - p).item() == -math.inf


@pytest.mark.parametrize("has_tail", [False, True])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_support_that_is_the_vocabulary_equals_the_full_divergence(alpha: float, has_tail: bool):
    student, teacher = random_logits(11, 4, 6)
    support = student.topk(6).indices

    def view(logits: Tensor) -> Tensor:
        top = logits.log_softmax(-1).gather(-1, support)
        return with_tail(top, tail_logp(logits, support)) if has_tail else renormalize(top)

    value = divergence(view(student), view(teacher), alpha=alpha)
    full = divergence(student.log_softmax(-1), teacher.log_softmax(-1), alpha=alpha)
    close(value, full)
    (grad,) = torch.autograd.grad(value.sum(), student)
    assert torch.isfinite(grad).all()
    close(grad, torch.autograd.grad(full.sum(), student)[0])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_lumped_tail_never_exceeds_the_full_divergence(alpha: float):
    for seed in range(20):
        student, teacher = random_logits(100 + seed, 50, 8, spread=0.5 + seed)
        full = divergence(student.log_softmax(-1), teacher.log_softmax(-1), alpha=alpha)
        for k in (1, 3, 7):
            ids = student.topk(k).indices
            views = [with_tail(x.log_softmax(-1).gather(-1, ids), tail_logp(x, ids)) for x in (student, teacher)]
            lumped = divergence(*views, alpha=alpha)
            assert (lumped <= full + 1e-10).all()
            assert lumped.min() >= -1e-12


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_tail_of_one_token_is_the_full_divergence(alpha: float):
    student, teacher = random_logits(12, 4, 3)
    ids = student.topk(2).indices
    views = [with_tail(x.log_softmax(-1).gather(-1, ids), tail_logp(x, ids)) for x in (student, teacher)]
    close(divergence(*views, alpha=alpha), divergence(student.log_softmax(-1), teacher.log_softmax(-1), alpha=alpha))


# --- buckets without mass, masked positions --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_bucket_that_neither_has_changes_neither_value_nor_gradient(alpha: float, dtype: torch.dtype):
    student = logs(0.25, 0.75, 0, dtype=dtype).requires_grad_()
    teacher = logs(0.5, 0.5, 0, dtype=dtype)
    value = divergence(student.log_softmax(-1), teacher, alpha=alpha)
    without = divergence(student[:2].log_softmax(-1), teacher[:2], alpha=alpha)
    close(value, without, atol=0)
    (grad,) = torch.autograd.grad(value, student)
    close(grad, torch.autograd.grad(without, student)[0], atol=0)
    assert grad[2] == 0


def test_a_bucket_only_the_student_has_adds_nothing_to_forward_kl():
    # T = (1, 0), S = (1/2, 1/2): 1 ln 2 + 0
    student = logs(0.5, 0.5).requires_grad_()
    value = forward_kl(student.log_softmax(-1), logs(1, 0))
    close(value, LN2)
    # p - q
    close(torch.autograd.grad(value, student)[0], torch.tensor([-0.5, 0.5], dtype=torch.float64))


def test_a_bucket_only_the_teacher_has_adds_nothing_to_reverse_kl():
    # S = (1, 0), T = (1/2, 1/2): 1 ln 2 + 0
    student = logs(1, 0).requires_grad_()
    value = reverse_kl(student.log_softmax(-1), logs(0.5, 0.5))
    close(value, LN2)
    # p (log(p / q) - D): 1 (ln 2 - ln 2) and 0
    close(torch.autograd.grad(value, student)[0], 0.0)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_jensen_shannon_is_finite_with_a_finite_gradient_where_either_side_has_no_mass(alpha: float):
    student = logs(0.5, 0.5, 0, 0).requires_grad_()
    value = jensen_shannon(student.log_softmax(-1), logs(0, 0.5, 0.5, 0), alpha=alpha)
    assert torch.isfinite(value)
    assert torch.isfinite(torch.autograd.grad(value, student)[0]).all()


def test_kl_is_infinite_where_mass_meets_none():
    assert forward_kl(logs(1, 0), logs(0.5, 0.5)) == math.inf
    assert reverse_kl(logs(0.5, 0.5), logs(1, 0)) == math.inf


def test_mass_that_underflows_in_fp32_meets_none_without_nan():
    student = torch.tensor([0.0, -200.0], requires_grad=True)  # e^-200 is 0 in fp32
    value = reverse_kl(student.log_softmax(-1), torch.tensor([0.0, -math.inf]))
    close(value, 0.0)
    assert torch.isfinite(torch.autograd.grad(value, student)[0]).all()


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("garbage", [-math.inf, math.nan, math.inf])
def test_masked_positions_are_finite_without_gradient_whatever_they_hold(garbage: float, alpha: float):
    mask = torch.tensor([True, False])
    student = torch.stack([logs(0.25, 0.75), torch.full((2,), garbage, dtype=torch.float64)]).requires_grad_()
    teacher = torch.stack([logs(0.5, 0.5), torch.full((2,), garbage, dtype=torch.float64)])
    value = divergence(masked(student, mask), masked(teacher, mask), alpha=alpha)
    close(value[0], divergence(student[0], teacher[0], alpha=alpha))
    close(value[1], 0.0)
    (grad,) = torch.autograd.grad(value.sum(), student)
    assert torch.isfinite(grad).all()
    assert (grad[1] == 0).all()


@pytest.mark.parametrize("lengths", [(3, 8)])
def test_minus_inf_among_served_log_probs_on_padding_stays_finite(lengths: tuple[int, int]):
    mask = torch.arange(8) < torch.tensor(lengths).unsqueeze(-1)
    student, teacher = (x.log_softmax(-1) for x in random_logits(13, 2, 8, 4))
    served = torch.where(mask.unsqueeze(-1), teacher, -math.inf)
    student = student.detach().requires_grad_()
    value = divergence(renormalize(masked(student, mask)), renormalize(masked(served, mask)), alpha=1.0)
    close(value, masked(divergence(student, teacher, alpha=1.0), mask))
    assert torch.isfinite(torch.autograd.grad(value.sum(), student)[0]).all()


# --- importance weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "weight"), [(1.0, 1.0), (1.5, 1.5), (2.0, 2.0), (8.0, 2.0), (0.001, 0.001)])
def test_importance_weight_is_the_ratio_capped_above_and_not_below(ratio: float, weight: float):
    old = torch.tensor([math.log(0.1)], dtype=torch.float64)
    close(importance_weight(old + math.log(ratio), old, cap=2.0), weight)


def test_no_gradient_passes_through_an_importance_weight():
    logps = logs(0.5, 0.5).requires_grad_()
    old_logps = logs(0.4, 0.6).requires_grad_()
    assert not importance_weight(logps, old_logps, cap=2.0).requires_grad


def test_importance_weight_that_overflows_is_the_cap():
    assert importance_weight(torch.tensor([0.0]), torch.tensor([-200.0]), cap=2.0) == 2.0


def test_rest_logp_is_what_a_support_leaves():
    close(rest_logp(logs(0.5, 0.2)), math.log(0.3))
    assert rest_logp(torch.zeros(1)).isfinite(), "a support with all the mass"
    assert rest_logp(torch.tensor([-1.0], dtype=torch.bfloat16)).dtype == torch.float32
