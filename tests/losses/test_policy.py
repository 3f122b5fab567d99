"""Advantages and the clipped surrogate, against values worked by hand."""

import math

import pytest
import torch
from torch import Tensor

from sdpo.losses.policy import group_advantages, policy_loss, reference_kl

NAN = math.nan
SCALES = ["group", "batch", "none"]


def rewards_of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def one_group(rewards: Tensor) -> Tensor:
    return torch.zeros(len(rewards), dtype=torch.long)


def close(actual: Tensor, expected: list | float | Tensor, *, atol: float = 1e-6) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected.expand_as(actual), rtol=0, atol=atol)


# --- advantages ------------------------------------------------------------------------------------------------------


def test_a_row_without_reward_is_out_of_the_baseline_and_gets_zero():
    rewards = rewards_of(NAN, -1, -1, -0.5)
    # mean -5/6; deviations -1/6, -1/6, 1/3; variance (1/36 + 1/36 + 4/36) / 2 = 1/12
    std = math.sqrt(1 / 12)
    expected = [0.0, -1 / 6 / (std + 1e-4), -1 / 6 / (std + 1e-4), 1 / 3 / (std + 1e-4)]
    advantages = group_advantages(rewards, one_group(rewards), scale="group")
    close(advantages, expected)
    close(advantages, [0, -0.577, -0.577, 1.154], atol=1e-3)


def test_without_scaling_one_success_in_four_has_advantage_three_quarters_exactly():
    rewards = rewards_of(1, 0, 0, 0)
    assert group_advantages(rewards, one_group(rewards), scale="none").tolist() == [0.75, -0.25, -0.25, -0.25]


def test_group_scaling_divides_by_the_unbiased_deviation_of_the_group():
    rewards = rewards_of(1, 0, 0, 0)
    # variance (9/16 + 3/16) / 3 = 1/4
    close(group_advantages(rewards, one_group(rewards), scale="group"), [0.75 / 0.5001] + [-0.25 / 0.5001] * 3)


def test_batch_scaling_divides_by_the_deviation_of_all_valid_rewards():
    rewards, groups = rewards_of(0, 2, 4, 6, NAN), torch.tensor([0, 0, 1, 1, 1])
    # means of the groups 1 and 5; all rewards: mean 3, variance (9 + 1 + 1 + 9) / 3 = 20/3
    unit = math.sqrt(20 / 3) + 1e-4
    close(group_advantages(rewards, groups, scale="batch"), [-1 / unit, 1 / unit, -1 / unit, 1 / unit, 0])


@pytest.mark.parametrize("scale", SCALES)
def test_groups_may_be_interleaved_and_have_any_numbers(scale):
    rewards = rewards_of(1, 5, 2, 7, 3, 6)
    apart = group_advantages(rewards, torch.tensor([40, 7, 40, 7, 40, 7]), scale=scale)
    order = torch.tensor([0, 2, 4, 1, 3, 5])
    together = group_advantages(rewards[order], torch.tensor([0, 0, 0, 1, 1, 1]), scale=scale)
    close(apart[order], together)


def test_each_group_has_its_own_baseline_and_deviation():
    rewards, groups = rewards_of(0, 2, 10, 30), torch.tensor([0, 0, 1, 1])
    # deviations -1, 1 with std sqrt(2); -10, 10 with std sqrt(200)
    small, large = 1 / (math.sqrt(2) + 1e-4), 10 / (math.sqrt(200) + 1e-4)
    close(group_advantages(rewards, groups, scale="group"), [-small, small, -large, large])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rewards", [(0.1, 0.1, 0.1), (NAN, 3.0, NAN), (NAN, NAN), (5.0,), (1e8 / 3,) * 7])
def test_equal_rewards_or_a_single_or_no_reward_give_exactly_zero(rewards: tuple[float, ...], scale):
    # In fp64 0.1 + 0.1 + 0.1 is not 3 times 0.1.
    values = torch.tensor(rewards, dtype=torch.float64)
    assert group_advantages(values, one_group(values), scale=scale).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_the_mean_of_large_fp32_rewards_is_not_rounded_to_fp32(scale):
    # Deviations -3/2, 1/2, 1/2, 1/2, variance 3 / 3. fp32 rounds the sum 2^26 + 6, and they become -2, 0, 0, 0.
    rewards = rewards_of(2**24, 2**24 + 2, 2**24 + 2, 2**24 + 2)
    close(group_advantages(rewards, one_group(rewards), scale=scale), [-1.5 / 1.0001] + [0.5 / 1.0001] * 3)


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_of_one_does_not_disturb_the_others(scale):
    rewards, groups = rewards_of(1, 0, 9), torch.tensor([0, 0, 1])
    advantages = group_advantages(rewards, groups, scale=scale)
    assert advantages[2] == 0
    assert advantages[0] == -advantages[1] > 0


@pytest.mark.parametrize("scale", SCALES)
def test_one_nan_leaves_all_advantages_finite_in_fp32(scale):
    rewards, groups = rewards_of(1, NAN, 0.5, 0, NAN, NAN), torch.tensor([0, 0, 0, 1, 1, 2])
    advantages = group_advantages(rewards, groups, scale=scale)
    assert advantages.dtype == torch.float32
    assert torch.isfinite(advantages).all()


@pytest.mark.parametrize("scale", SCALES)
def test_a_large_common_offset_of_rewards_costs_no_precision(scale):
    rewards = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    shifted = group_advantages(rewards + 1e9, one_group(rewards), scale=scale)
    close(shifted, group_advantages(rewards, one_group(rewards), scale=scale))


# --- clipped surrogate -----------------------------------------------------------------------------------------------


def surrogate(ratios: list[list[float]], advantages: list[float], mask: Tensor | None = None, **options):
    """Log-probs on a leaf, loss and clip indicator for these ratios, in fp64."""
    old_logps = torch.full((len(ratios), len(ratios[0])), math.log(0.1), dtype=torch.float64)
    logps = (old_logps + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    mask = torch.ones_like(old_logps, dtype=torch.bool) if mask is None else mask
    options = {"epsilon": 0.2, "epsilon_high": 0.2, "level": "token"} | options
    return logps, *policy_loss(logps, old_logps, torch.tensor(advantages), mask, **options)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.4, True),  # -min(3.0, 1.2 * 2)
        (1.5, -2.0, 3.0, False),  # -min(-3.0, -2.4): the unclipped branch is the smaller one
        (0.5, 2.0, -1.0, False),  # -min(1.0, 1.6)
        (0.5, -2.0, 1.6, True),  # -min(-1.0, -1.6)
        (1.5, 0.0, 0.0, False),
        (0.5, 0.0, 0.0, False),
    ],
)
def test_surrogate_is_clipped_only_where_that_makes_it_smaller(ratio, advantage, loss, is_clipped):
    logps, value, clipped = surrogate([[ratio]], [advantage])
    close(value, loss)
    assert clipped.item() is is_clipped
    # d(-r A)/d logp = -r A; a clipped token has no gradient
    close(torch.autograd.grad(value.sum(), logps)[0], 0.0 if is_clipped else -ratio * advantage)


@pytest.mark.parametrize(
    ("ratio", "loss", "is_clipped"), [(1.25, -1.25, False), (1.3, -1.28, True), (0.7, -0.7, False)]
)
def test_the_upper_bound_is_its_own(ratio, loss, is_clipped):
    _, value, clipped = surrogate([[ratio]], [1.0], epsilon=0.2, epsilon_high=0.28)
    close(value, loss)
    assert clipped.item() is is_clipped


def test_the_lower_bound_is_its_own():
    _, value, clipped = surrogate([[0.75, 0.85]], [-1.0], epsilon=0.2, epsilon_high=0.28)
    close(value, [[0.8, 0.85]])  # -min(-0.75, -0.8); -min(-0.85, -0.85)
    assert clipped.tolist() == [[True, False]]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ratio_is_exactly_one_where_the_weights_are_those_that_sampled(level):
    logps = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.ones(2, 3, dtype=torch.bool)
    advantages = torch.tensor([0.7, -0.3])
    options = {"epsilon": 0.2, "epsilon_high": 0.2, "level": level}
    without, _ = policy_loss(logps, None, advantages, mask, **options)
    given, clipped = policy_loss(logps, logps.detach().clone(), advantages, mask, **options)
    assert without.tolist() == given.tolist() == (-advantages).unsqueeze(-1).expand(2, 3).tolist()
    assert not clipped.any()
    # r = 1 passes the gradient of logp on: d(-r A) = -A d logp at the token level. At the sequence level each of the
    # three equal losses spreads -A over the three tokens, in thirds: the same sum.
    close(torch.autograd.grad(without.sum(), logps)[0], (-advantages).unsqueeze(-1).expand(2, 3))


def test_sequence_ratio_is_the_geometric_mean_over_the_masked_tokens():
    mask = torch.tensor([[True, True, False]])
    logps, value, clipped = surrogate([[2.0, 0.605, 50.0]], [1.0], mask, level="sequence")
    # sqrt(2 * 0.605) = sqrt(1.21) = 1.1
    close(value, [[-1.1, -1.1, 0.0]])
    assert not clipped.any()
    # The mean over the two tokens is -1.1; its derivative spreads over them in halves.
    close(torch.autograd.grad(value.sum() / 2, logps)[0], [[-0.55, -0.55, 0.0]])


def test_sequence_ratio_is_clipped_as_a_whole():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    _, value, clipped = surrogate([[2.0, 2.0, 1.0], [1.0, 1.0, 1.0]], [1.0, 1.0], mask, level="sequence")
    close(value, [[-1.2, -1.2, 0.0], [-1.0, -1.0, -1.0]])
    assert clipped.tolist() == [[True, True, False], [False, False, False]]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("garbage", [-math.inf, math.nan])
def test_masked_tokens_have_no_effect_whatever_they_hold(garbage: float, level):
    mask = torch.tensor([[True, False], [False, False]])
    logps = torch.tensor([[-1.0, garbage], [garbage, garbage]], requires_grad=True)
    old_logps = torch.tensor([[-1.1, garbage], [garbage, garbage]])
    options = {"epsilon": 0.2, "epsilon_high": 0.2, "level": level}
    value, clipped = policy_loss(logps, old_logps, torch.tensor([1.0, 1.0]), mask, **options)
    close(value, [[-math.exp(0.1), 0.0], [0.0, 0.0]])
    assert not clipped.any()
    close(torch.autograd.grad(value.sum(), logps)[0], [[-math.exp(0.1), 0.0], [0.0, 0.0]])


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_that_overflows_keeps_loss_and_gradient_finite(advantage: float):
    logps = torch.tensor([[0.0]], requires_grad=True)
    options = {"epsilon": 0.2, "epsilon_high": 0.2, "level": "token"}
    mask = torch.ones(1, 1, dtype=torch.bool)
    value, _ = policy_loss(logps, torch.tensor([[-200.0]]), torch.tensor([advantage]), mask, **options)
    assert torch.isfinite(value).all()
    assert torch.isfinite(torch.autograd.grad(value.sum(), logps)[0]).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradient_of_the_surrogate_agrees_with_finite_differences(level):
    generator = torch.Generator().manual_seed(1)
    old_logps = -torch.rand(3, 4, generator=generator, dtype=torch.float64)
    logps = (old_logps + 0.5 * torch.randn(3, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = torch.arange(4) < torch.tensor([4, 2, 0]).unsqueeze(-1)
    advantages = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)

    def value(x: Tensor) -> Tensor:
        return policy_loss(x, old_logps, advantages, mask, epsilon=0.2, epsilon_high=0.28, level=level)[0]

    assert torch.autograd.gradcheck(value, logps)


# --- KL to the reference ---------------------------------------------------------------------------------------------


def test_reference_kl_of_a_token_half_as_likely_under_the_reference():
    # r = 1/2: 1/2 + ln 2 - 1; its derivative with respect to logp is 1 - r = 1/2
    logps = torch.tensor([0.5], dtype=torch.float64).log().requires_grad_()
    value = reference_kl(logps, torch.tensor([0.25], dtype=torch.float64).log())
    close(value, math.log(2) - 0.5)
    close(torch.autograd.grad(value.sum(), logps)[0], 0.5)


def test_reference_kl_is_zero_at_the_reference_and_positive_on_both_sides():
    logps = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    value = reference_kl(logps, torch.tensor([-1.0, -0.5, -1.5]))
    assert value[0] == 0
    assert (value[1:] > 0).all()
    assert torch.autograd.grad(value.sum(), logps)[0][0] == 0


def test_expected_reference_kl_over_the_vocabulary_is_the_kl():
    policy = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    reference = torch.tensor([0.5, 0.4, 0.1], dtype=torch.float64)
    expectation = (policy * reference_kl(policy.log(), reference.log())).sum()
    close(expectation, (policy * (policy / reference).log()).sum(), atol=1e-12)


def test_reference_kl_has_no_gradient_to_the_reference_and_stays_finite():
    logps, reference_logps = torch.tensor([-200.0], requires_grad=True), torch.tensor([0.0], requires_grad=True)
    value = reference_kl(logps, reference_logps)
    assert torch.isfinite(value).all()
    value.sum().backward()
    assert torch.isfinite(logps.grad).all()
    assert reference_logps.grad is None
