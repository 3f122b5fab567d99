"""The weight for a sampler with log-probs of its own, against values worked by hand, and what it does to the loss."""

import math
from dataclasses import replace

import pytest
import torch
from plain import SETTINGS
from test_objective import DISTILLATION, POLICY, batch_of, close, logged, mask_of, terms_of
from torch import Tensor

from sdpo.losses.objective import objective
from sdpo.losses.sampler import sampler_weight

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
UNKNOWN = [math.nan, -math.inf, math.inf]


def weigh(ratios: list[list[float]], *, mode: str, mask: Tensor | None = None, cap: float = 2.0):
    """Weight and cut tokens for these ratios of trainer to sampler, in fp64."""
    sampled = torch.full((len(ratios), len(ratios[0])), math.log(0.1), dtype=torch.float64)
    logps = sampled + torch.tensor(ratios, dtype=torch.float64).log()
    mask = torch.ones_like(sampled, dtype=torch.bool) if mask is None else mask
    return sampler_weight(logps, sampled, mask, mode=mode, cap=cap)


# --- the weight ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # Products of the rows: 0.5 * 1.5 = 0.75, 3 * 0.9 = 2.7, 0.1 * 4 = 0.4
        ("token_truncate", [[0.5, 1.5], [2.0, 0.9], [0.1, 2.0]]),
        ("token_mask", [[0.5, 1.5], [0.0, 0.9], [0.1, 0.0]]),
        ("sequence_truncate", [[0.75, 0.75], [2.0, 2.0], [0.4, 0.4]]),
        ("sequence_mask", [[0.75, 0.75], [0.0, 0.0], [0.4, 0.4]]),
    ],
)
def test_above_the_cap_a_token_or_its_row_is_truncated_or_masked(mode, expected):
    weight, is_cut = weigh([[0.5, 1.5], [3.0, 0.9], [0.1, 4.0]], mode=mode)
    close(weight, expected)
    by_token, by_row = [[False, False], [True, False], [False, True]], [[False] * 2, [True] * 2, [False] * 2]
    assert is_cut.tolist() == (by_token if mode.startswith("token") else by_row)


@pytest.mark.parametrize("mode", MODES)
def test_at_the_cap_nothing_is_cut(mode):
    zero = torch.zeros(1, 1)
    weight, is_cut = sampler_weight(zero, zero, torch.ones(1, 1, dtype=torch.bool), mode=mode, cap=1.0)
    assert weight.tolist() == [[1.0]] and not is_cut.any()


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_the_ratio_of_a_sequence_is_the_product_over_its_masked_tokens(mode):
    weight, _ = weigh([[0.5, 1.5, 50.0]], mode=mode, mask=mask_of(2, size=3))
    close(weight, [[0.75, 0.75, 1.0]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("garbage", UNKNOWN)
def test_what_padding_holds_has_no_effect(mode, garbage: float):
    mask = mask_of(2, 0, size=3)
    logps, sampled = torch.full((2, 3), garbage), torch.full((2, 3), garbage)
    logps[0, :2], sampled[0, :2] = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    weight, is_cut = sampler_weight(logps, sampled, mask, mode=mode, cap=4.0)
    ratios = [2.0, 0.5] if mode.startswith("token") else [1.0, 1.0]
    close(weight, [[*ratios, 1.0], [1.0] * 3])
    assert not is_cut.any()


@pytest.mark.parametrize("garbage", UNKNOWN)
@pytest.mark.parametrize(("mode", "expected"), [("token_truncate", [0.5, 1.0, 1.5]), ("sequence_mask", [0.75] * 3)])
def test_a_token_that_the_sampler_has_no_log_prob_of_has_the_ratio_one(mode, expected, garbage: float):
    sampled = torch.tensor([[-1.0, garbage, -1.0]])
    logps = torch.tensor([[-1 + math.log(0.5), -3.0, -1 + math.log(1.5)]])
    close(sampler_weight(logps, sampled, mask_of(3, size=3), mode=mode, cap=2.0)[0], [expected])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gap", [1e30, -1e30, 200.0, -200.0])
def test_log_probs_far_apart_give_a_finite_weight(mode, gap: float):
    weight, is_cut = sampler_weight(torch.tensor([[gap]]), torch.zeros(1, 1), mask_of(1, size=1), mode=mode, cap=1e12)
    close(weight.log(), [[20.0 if gap > 0 else -20.0]], atol=1e-5)
    assert not is_cut.any()


@pytest.mark.parametrize("mode", MODES)
def test_no_gradient_passes_through_the_weight(mode):
    logps, sampled = torch.zeros(1, 2, requires_grad=True), torch.zeros(1, 2, requires_grad=True)
    weight, _ = sampler_weight(logps, sampled, mask_of(2, size=2), mode=mode, cap=2.0)
    assert not weight.requires_grad


# --- in the loss -----------------------------------------------------------------------------------------------------


def settings_of(mode: str | None, **values):
    return replace(SETTINGS, sampler_correction=mode, **values)


def example(**values):
    """Terms of 2 and 3 tokens with gradients, and their batch with a sampler that is the trainer."""
    generator = torch.Generator().manual_seed(0)
    logps = (-torch.rand(2, 3, generator=generator)).requires_grad_()
    divergence = torch.rand(2, 3, generator=generator, requires_grad=True)
    values.setdefault("sampled_logps", logps.detach().clone())
    values.setdefault("old_logps", None)
    batch = batch_of(mask_of(2, 3, size=3), advantages=torch.tensor([1.0, -0.5]), **values)
    return terms_of(divergence, logps), batch


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_reused", [False, True])
def test_a_sampler_that_is_the_trainer_changes_no_bit_of_the_loss_and_its_gradient(mode, is_reused: bool):
    def run(chosen: str | None):
        terms, batch = example()
        if is_reused:  # then it is the weights of then that sampled
            old_logps = batch.sampled_logps - 0.1
            batch = replace(batch, old_logps=old_logps, sampled_logps=old_logps.clone())
        value = objective(terms, batch, settings_of(chosen, weight=0.5))
        return value, torch.autograd.grad(value.loss, [terms.logps, terms.divergence])

    (value, gradients), (plain_value, plain_gradients) = run(mode), run(None)
    assert torch.equal(value.loss, plain_value.loss)
    assert all(map(torch.equal, gradients, plain_gradients))
    assert logged(value, "sampling/importance_weight") == 1
    assert logged(value, "sampling/logp_difference") == logged(value, "sampling/cut_fraction") == 0


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        # Ratios 0.5, 4 | 1.5, 1, 1
        ("token_truncate", [[0.5, 2.0], [1.5, 1.0, 1.0]]),
        ("token_mask", [[0.5, 0.0], [1.5, 1.0, 1.0]]),
        ("sequence_truncate", [[2.0, 2.0], [1.5, 1.5, 1.5]]),
        ("sequence_mask", [[2.0, 2.0], [1.5, 1.5, 1.5]]),  # 2 is not above the cap
    ],
)
def test_both_terms_are_weighed_and_divided_by_all_their_tokens(mode, weights):
    terms, batch = example()
    ratios = torch.tensor([[0.5, 4.0, 1.0], [1.5, 1.0, 1.0]])
    batch = replace(batch, sampled_logps=batch.sampled_logps - ratios.log())
    value = objective(terms, batch, settings_of(mode, weight=0.25, sampler_cap=2.0 + 1e-6))
    # The surrogate of a fresh block is -A: -1 and 0.5.
    first, second = torch.tensor(weights[0]), torch.tensor(weights[1])
    policy = (-first.sum() + 0.5 * second.sum()) / 5
    distance = terms.divergence.detach()
    distillation = ((first * distance[0, :2]).sum() + (second * distance[1]).sum()) / 5
    close(value.loss, 0.75 * policy + 0.25 * distillation, atol=1e-5)
    assert logged(value, POLICY) == pytest.approx(policy.item(), abs=1e-5)
    assert logged(value, DISTILLATION) == pytest.approx(distillation.item(), abs=1e-5)
    of_logps, of_divergence = torch.autograd.grad(value.loss, [terms.logps, terms.divergence])
    # Nothing through the weight: -A w d logp of the surrogate, w d D of the divergence.
    weight = torch.stack([torch.nn.functional.pad(first, (0, 1)), second])
    close(of_logps, 0.75 * weight * torch.tensor([[-1.0], [0.5]]) / 5)
    close(of_divergence, 0.25 * weight / 5)


def test_the_weights_that_sampled_are_compared_with_the_sampler():
    # Trainer then 0.2, sampler 0.1: weight 2. Now 0.22: ratio 1.1 for the surrogate, and for the divergence.
    batch = batch_of(
        mask_of(1, size=1),
        advantages=torch.ones(1),
        old_logps=torch.tensor([[0.2]]).log(),
        sampled_logps=torch.tensor([[0.1]]).log(),
    )
    terms = terms_of(torch.full((1, 1), 3.0), torch.tensor([[0.22]]).log())
    value = objective(terms, batch, settings_of("token_truncate", weight=0.5, sampler_cap=5.0))
    close(value.loss, 0.5 * 2 * -1.1 + 0.5 * 2 * 1.1 * 3, atol=1e-5)


def test_the_kl_to_the_reference_is_not_weighed():
    # Weight 1/2; the surrogate is -1, the KL at half the log-prob is ln 2 - 1/2.
    logps = torch.tensor([[0.5]]).log()
    batch = batch_of(
        mask_of(1, size=1),
        advantages=torch.ones(1),
        reference_logps=torch.tensor([[0.25]]).log(),
        sampled_logps=torch.tensor([[1.0]]).log(),
    )
    value = objective(terms_of([[0.0]], logps), batch, settings_of("token_mask", weight=0.0, beta=0.1))
    close(value.loss, -0.5 + 0.1 * (math.log(2) - 0.5))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_minus_inf_among_sampled_log_probs_on_padding_leaves_loss_and_gradient_finite(level, kind):
    generator = torch.Generator().manual_seed(0)
    mask = mask_of(3, 8, size=8)
    logps = (-torch.rand(2, 8, generator=generator)).requires_grad_()
    served = torch.where(mask, -torch.rand(2, 8, generator=generator), -math.inf)
    batch = batch_of(mask, advantages=torch.tensor([1.0, -1.0]), sampled_logps=served)
    value = objective(terms_of(logps.square(), logps), batch, settings_of(f"{level}_{kind}", weight=0.5))
    assert torch.isfinite(value.loss)
    assert all(torch.isfinite(x).all() for pair in value.sums.values() for x in pair)
    assert torch.isfinite(torch.autograd.grad(value.loss, logps)[0]).all()


def test_what_is_logged_of_the_sampler_is_of_the_tokens_of_the_terms_computed():
    # Row 0 is in the policy term, row 1 in the distillation; the last column is padding. Ratios 1/2, 4 | 1, unknown.
    ratios = torch.tensor([[0.5, 4.0, 9.0], [1.0, math.nan, 9.0]])
    batch = batch_of(mask_of(2, 0, size=3), mask_of(0, 2, size=3), sampled_logps=-ratios.log())
    terms = terms_of(torch.zeros(2, 3))
    value = objective(terms, batch, settings_of("token_truncate", weight=0.5))
    assert logged(value, "sampling/importance_weight") == pytest.approx((0.5 + 2 + 1 + 1) / 4)
    assert logged(value, "sampling/cut_fraction") == 1 / 4
    assert logged(value, "sampling/unknown_fraction") == 1 / 4
    assert logged(value, "sampling/logp_difference") == pytest.approx((math.log(2) + math.log(4)) / 3)
    distilled = objective(terms, batch, settings_of("token_truncate", weight=1.0))
    assert logged(distilled, "sampling/importance_weight") == 1
    assert logged(distilled, "sampling/unknown_fraction") == 1 / 2
    assert all(not t.requires_grad and t.shape == () for pair in value.sums.values() for t in pair)


@pytest.mark.parametrize(("mode", "has_logps"), [(None, True), ("token_truncate", False)])
def test_there_is_no_correction_without_a_mode_or_without_log_probs_of_a_sampler(mode, has_logps: bool):
    terms, batch = example(sampled_logps=torch.full((2, 3), -9.0) if has_logps else None)
    value = objective(terms, batch, settings_of(mode, weight=0.5))
    assert torch.equal(
        value.loss, objective(terms, replace(batch, sampled_logps=None), settings_of(None, weight=0.5)).loss
    )
    assert not [name for name in value.sums if name.startswith("sampling/")]
