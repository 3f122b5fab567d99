"""The loss of a step: worked values, one update whatever the cut, and what must have no effect."""

import math
from dataclasses import fields, replace

import plain
import pytest
import torch
from plain import SETTINGS
from torch import Tensor

from sdpo.losses.divergence import masked, renormalize
from sdpo.losses.objective import blend, loss_fraction, objective, reduce_loss
from sdpo.losses.policy import group_advantages
from sdpo.types import LossCounts, LossTerms, ObjectiveSettings, Sequences, TokenTerms, TrainingBatch

LOSS_TYPES = ["dapo", "grpo", "dr_grpo", "bnpo"]
DISTILLATION = "self_distillation/distillation_loss"
POLICY = "self_distillation/policy_loss"

EMPTY = torch.zeros(0, 0, dtype=torch.long)
NOTHING = Sequences(ids=EMPTY, positions=EMPTY, segments=EMPTY, predictors=EMPTY, is_shared=False)


def mask_of(*lengths: int, size: int) -> Tensor:
    """(B, T), true on the first tokens of each row."""
    return torch.arange(size) < torch.tensor(lengths).unsqueeze(-1)


def batch_of(policy_mask: Tensor, distillation_mask: Tensor | None = None, **values) -> TrainingBatch:
    """A microbatch with these masks; the sequences, which no loss reads, are empty."""
    values.setdefault("completion_mask", torch.ones_like(policy_mask))
    values.setdefault("advantages", torch.zeros(len(policy_mask)))
    return TrainingBatch(
        student=NOTHING,
        teacher=NOTHING,
        completion_ids=torch.zeros_like(policy_mask, dtype=torch.long),
        policy_mask=policy_mask,
        distillation_mask=policy_mask if distillation_mask is None else distillation_mask,
        **values,
    )


def counts_of(batches: list[TrainingBatch]) -> LossCounts:
    """The counts of a step made of these microbatches."""
    policy, distillation = [b.policy_mask for b in batches], [b.distillation_mask for b in batches]
    return LossCounts(
        policy_tokens=float(sum(m.sum() for m in policy)),
        policy_sequences=float(sum(m.any(-1).sum() for m in policy)),
        distillation_tokens=float(sum(m.sum() for m in distillation)),
        distillation_sequences=float(sum(m.any(-1).sum() for m in distillation)),
        microbatches=float(len(batches)),
    )


def terms_of(divergence: Tensor | list, logps: Tensor | None = None, **values) -> TokenTerms:
    divergence = torch.as_tensor(divergence)
    logps = torch.zeros_like(divergence) if logps is None else logps
    values.setdefault("entropy", torch.zeros_like(logps))
    return TokenTerms(logps=logps, divergence=divergence, **values)


def logged(terms: LossTerms | list[LossTerms], name: str) -> float:
    """The value that the log shows for these microbatches."""
    every = terms if isinstance(terms, list) else [terms]
    return (sum(t.sums[name][0] for t in every) / sum(t.sums[name][1] for t in every)).item()


def close(actual: Tensor, expected: float | list | Tensor, *, atol: float = 1e-6) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# --- reductions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("dapo", 10 / 4),  # (1 + 2 + 3 + 4) / 4 tokens
        ("grpo", (2 + 4) / 2),  # means 2 and 4 of two sequences; the third has no token
        ("dr_grpo", 10 / (2 * 5)),  # two sequences of at most 5 tokens
        ("bnpo", 10 / 4),  # of one microbatch
    ],
)
def test_reduction_of_lengths_three_one_and_zero(loss_type, expected: float):
    per_token = torch.tensor([[1.0, 2.0, 3.0], [4.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
    mask = mask_of(3, 1, 0, size=3)
    terms = objective(terms_of(per_token), batch_of(mask), replace(SETTINGS, loss_type=loss_type))
    close(terms.loss, expected)
    assert logged(terms, DISTILLATION) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("dapo", 10 / 20),
        ("grpo", (2 + 4) / 8),
        ("dr_grpo", 10 / (8 * 5)),
        ("bnpo", (10 / 4) / 2),
    ],
)
def test_a_microbatch_is_divided_by_the_counts_of_the_step(loss_type, expected: float):
    # 20 tokens, 8 sequences and 2 microbatches in the step, of which 4, 2 and 1 are here
    per_token = torch.tensor([[1.0, 2.0, 3.0], [4.0, 99.0, 99.0]])
    value = reduce_loss(
        per_token,
        mask_of(3, 1, size=3),
        loss_type=loss_type,
        tokens=20.0,
        sequences=8.0,
        microbatches=2.0,
        max_completion_length=5,
    )
    close(value, expected)


def test_bnpo_is_the_mean_of_the_means_of_its_microbatches():
    parts = [batch_of(mask_of(1, size=3)), batch_of(mask_of(3, size=3))]
    counts = counts_of(parts)
    values = [torch.tensor([[8.0, 99.0, 99.0]]), torch.tensor([[1.0, 2.0, 3.0]])]
    settings = replace(SETTINGS, loss_type="bnpo")
    terms = [objective(terms_of(v), replace(b, counts=counts), settings) for v, b in zip(values, parts, strict=True)]
    close(sum(t.loss for t in terms), (8 + 2) / 2)
    assert logged(terms, DISTILLATION) == pytest.approx(5)


def test_each_term_divides_by_the_tokens_it_trains_on():
    # Policy: four tokens of -A = -1. Distillation: two tokens of divergence 6.
    batch = batch_of(mask_of(2, 2, size=2), mask_of(2, 0, size=2), advantages=torch.ones(2))
    terms = objective(terms_of(torch.full((2, 2), 6.0)), batch, replace(SETTINGS, weight=0.25))
    close(terms.loss, 0.75 * -1 + 0.25 * 6)
    assert logged(terms, POLICY) == -1
    assert logged(terms, DISTILLATION) == 6


def test_a_group_without_context_does_not_dilute_the_distillation_of_the_other():
    # Two groups of two completions, one without any context: 3e-4 a token, not half of it.
    value = 3e-4
    batch = batch_of(mask_of(4, 4, 4, 4, size=4), mask_of(4, 4, 0, 0, size=4))
    terms = objective(terms_of(torch.full((4, 4), value)), batch, SETTINGS)
    close(terms.loss, value, atol=1e-10)
    assert logged(terms, DISTILLATION) == pytest.approx(value) == pytest.approx(terms.loss.item())


# --- weights of the two terms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.5, 1.0])
def test_loss_is_the_weighted_sum_of_the_two_terms(weight: float):
    generator = torch.Generator().manual_seed(0)
    mask = mask_of(3, 2, size=3)
    batch = batch_of(mask, advantages=torch.tensor([0.3, -0.8]), old_logps=-torch.rand(2, 3, generator=generator))
    terms = terms_of(torch.rand(2, 3, generator=generator), -torch.rand(2, 3, generator=generator))
    policy = objective(terms, batch, replace(SETTINGS, weight=0.0)).loss
    distillation = objective(terms, batch, SETTINGS).loss
    both = objective(terms, batch, replace(SETTINGS, weight=weight)).loss
    close(both, (1 - weight) * policy + weight * distillation)
    assert blend(policy.item(), distillation.item(), weight=weight) == pytest.approx(both.item(), abs=1e-6)


def test_at_weight_one_the_policy_term_is_neither_computed_nor_logged():
    logps = torch.full((1, 2), math.nan)
    batch = batch_of(mask_of(2, size=2), mask_of(1, size=2), advantages=torch.tensor([math.nan]))
    terms = objective(terms_of([[3.0, 5.0]], logps, entropy=torch.tensor([[7.0, 99.0]])), batch, SETTINGS)
    close(terms.loss, 3.0)
    assert POLICY not in terms.sums
    assert logged(terms, "entropy") == 7  # of the distilled token alone


def test_at_weight_zero_there_is_no_divergence_to_give():
    batch = batch_of(mask_of(2, size=2), advantages=torch.tensor([2.0]))
    terms = TokenTerms(logps=torch.zeros(1, 2), entropy=torch.ones(1, 2))
    value = objective(terms, batch, replace(SETTINGS, weight=0.0))
    close(value.loss, -2.0)
    assert set(value.sums) == {POLICY, "entropy"}


def test_a_missing_divergence_is_refused_where_it_is_weighed():
    with pytest.raises(AssertionError, match="divergence"):
        objective(TokenTerms(torch.zeros(1, 1), torch.zeros(1, 1)), batch_of(mask_of(1, size=1)), SETTINGS)


def test_policy_gradient_raises_what_has_a_positive_advantage():
    # d loss / d logp = -A / 2 tokens
    logps = torch.tensor([[-1.0], [-2.0]], requires_grad=True)
    batch = batch_of(mask_of(1, 1, size=1), advantages=torch.tensor([0.75, -0.25]))
    objective(terms_of(torch.zeros(2, 1), logps), batch, replace(SETTINGS, weight=0.0)).loss.backward()
    close(logps.grad, [[-0.375], [0.125]])


def test_a_reward_that_is_nan_leaves_loss_and_gradient_finite():
    advantages = group_advantages(torch.tensor([1.0, math.nan, 0.0]), torch.zeros(3, dtype=torch.long), scale="group")
    logps = torch.full((3, 2), -1.0, requires_grad=True)
    batch = batch_of(mask_of(2, 2, 2, size=2), advantages=advantages)
    value = objective(terms_of(torch.zeros(3, 2), logps), batch, replace(SETTINGS, weight=0.0))
    value.loss.backward()
    assert torch.isfinite(value.loss)
    assert torch.isfinite(logps.grad).all()
    assert (logps.grad[1] == 0).all()


# --- KL to the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.1, 100.0])
def test_beta_adds_the_kl_to_the_reference_and_its_gradient(beta: float):
    # r = reference / policy = 1/2 at both tokens: KL 1/2 + ln 2 - 1, derivative 1 - 1/2; advantage 1 gives -1 and -1
    logps = torch.full((1, 2), math.log(0.5), requires_grad=True)
    batch = batch_of(mask_of(2, size=2), advantages=torch.ones(1), reference_logps=torch.full((1, 2), math.log(0.25)))
    value = objective(terms_of(torch.zeros(1, 2), logps), batch, replace(SETTINGS, weight=0.0, beta=beta))
    close(value.loss, -1 + beta * (math.log(2) - 0.5), atol=1e-5)
    value.loss.backward()
    close(logps.grad, [[(-1 + beta * 0.5) / 2] * 2], atol=1e-5)


def test_the_kl_is_logged_without_its_coefficient_over_the_policy_tokens():
    logps, reference_logps = torch.full((1, 3), math.log(0.5)), torch.full((1, 3), math.log(0.25))
    reference_logps[0, 2] = -math.inf
    batch = batch_of(mask_of(2, size=3), reference_logps=reference_logps)
    value = objective(terms_of(torch.zeros(1, 3), logps), batch, replace(SETTINGS, weight=0.5, beta=7.0))
    assert logged(value, "kl") == pytest.approx(math.log(2) - 0.5)
    assert torch.isfinite(value.loss)


def test_a_missing_reference_is_refused_where_beta_weighs_it():
    with pytest.raises(AssertionError, match="reference"):
        settings = replace(SETTINGS, weight=0.0, beta=0.1)
        objective(terms_of(torch.zeros(1, 1)), batch_of(mask_of(1, size=1)), settings)


# --- reused blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_clip", "expected"),
    [
        (2.0, (0.5 * 1 + 2.0 * 3) / 2),  # ratios 1/2 and 4, the latter capped
        (8.0, (0.5 * 1 + 4.0 * 3) / 2),
        (None, (1 + 3) / 2),
    ],
)
def test_a_reused_block_weighs_each_token_by_its_capped_ratio(is_clip: float | None, expected: float):
    logps = torch.tensor([[0.25, 0.8, 0.1]]).log()
    old_logps = torch.tensor([[0.5, 0.2, 0.0]]).log()  # -inf at the masked token
    batch = batch_of(mask_of(2, size=3), old_logps=old_logps)
    value = objective(terms_of([[1.0, 3.0, 5.0]], logps), batch, replace(SETTINGS, is_clip=is_clip))
    close(value.loss, expected)
    assert logged(value, DISTILLATION) == pytest.approx(expected)


def test_a_fresh_block_has_weight_one():
    value = objective(terms_of([[1.0, 3.0]], torch.tensor([[-9.0, -1.0]])), batch_of(mask_of(2, size=2)), SETTINGS)
    close(value.loss, 2.0)


def test_no_gradient_passes_through_the_importance_weight_of_the_distillation():
    logps = torch.tensor([[-1.0]], requires_grad=True)
    per_token = torch.tensor([[3.0]], requires_grad=True)
    batch = batch_of(mask_of(1, size=1), old_logps=torch.tensor([[-1.5]]))
    objective(terms_of(per_token, logps), batch, SETTINGS).loss.backward()
    assert logps.grad is None
    close(per_token.grad, [[math.exp(0.5)]])


def test_the_importance_weight_of_a_masked_token_leaves_its_gradient_zero_whatever_it_holds():
    per_token = torch.tensor([[3.0, 3.0]], requires_grad=True)
    batch = batch_of(mask_of(1, size=2), old_logps=torch.tensor([[0.0, math.nan]]))
    objective(terms_of(per_token, torch.zeros(1, 2)), batch, SETTINGS).loss.backward()
    assert per_token.grad.tolist() == [[1.0, 0.0]]


def test_the_upper_clip_bound_is_that_of_the_settings():
    # Ratio 2 at advantage 1, clipped to 1.28
    batch = batch_of(mask_of(1, size=1), advantages=torch.ones(1), old_logps=torch.tensor([[-math.log(2)]]))
    settings = replace(SETTINGS, weight=0.0, epsilon_high=0.28)
    close(objective(terms_of(torch.zeros(1, 1)), batch, settings).loss, -1.28)


def test_ratio_and_weight_are_exactly_one_at_the_first_use_of_a_block():
    logps = -torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    batch = batch_of(mask_of(3, 2, size=3), advantages=torch.tensor([0.7, -0.3]))
    settings = replace(SETTINGS, weight=0.5)
    terms = terms_of(torch.rand(2, 3), logps)
    fresh = objective(terms, batch, settings)
    reused = objective(terms, replace(batch, old_logps=logps.clone()), settings)
    assert fresh.loss == reused.loss
    assert logged(reused, "policy/clip_fraction") == 0
    assert "policy/clip_fraction" not in fresh.sums


def test_clip_fraction_counts_the_policy_tokens_that_were_clipped():
    # Ratios 1, 2, 1/2 at advantage 1: only the second is clipped. The masked one would be.
    logps = torch.tensor([[1.0, 2.0, 0.5, 2.0]]).log()
    batch = batch_of(mask_of(3, size=4), advantages=torch.ones(1), old_logps=torch.zeros(1, 4))
    value = objective(terms_of(torch.zeros(1, 4), logps), batch, replace(SETTINGS, weight=0.0))
    assert logged(value, "policy/clip_fraction") == pytest.approx(1 / 3)


@pytest.mark.parametrize(("level", "expected"), [("token", -(1.2 + 0.5) / 2), ("sequence", -1.0)])
def test_importance_sampling_level_is_that_of_the_settings(level, expected: float):
    # Ratios 2 and 1/2 at advantage 1: clipped to 1.2 and kept by token, geometric mean 1 by sequence
    batch = batch_of(mask_of(2, size=2), advantages=torch.ones(1), old_logps=torch.zeros(1, 2))
    terms = terms_of(torch.zeros(1, 2), torch.tensor([[2.0, 0.5]]).log())
    close(objective(terms, batch, replace(SETTINGS, weight=0.0, importance_sampling_level=level)).loss, expected)


# --- what is logged --------------------------------------------------------------------------------------------------


def test_sampled_token_logs_the_kl_estimate_not_a_surrogate():
    # log s - log t = 2 ln 2 and -ln 2; the surrogate (log s - log t) log s would be 2 ln 2 ln 0.8 - ln 2 ln 0.2
    student = torch.tensor([[0.8, 0.2]]).log().requires_grad_()
    teacher = torch.tensor([[0.2, 0.4]]).log()
    per_token = plain.sampled_token_kl(student, teacher)
    value = objective(terms_of(per_token, student), batch_of(mask_of(2, size=2)), SETTINGS)
    expected = (2 - 1) * math.log(2) / 2
    assert logged(value, DISTILLATION) == pytest.approx(expected)
    close(value.loss, expected)
    value.loss.backward()
    close(student.grad, [[math.log(2), -math.log(2) / 2]])  # (log s - log t) / 2 tokens


def test_credit_is_averaged_over_the_distilled_tokens():
    credit = torch.tensor([[2.0, -1.0, 0.5, 99.0], [99.0, 99.0, 99.0, 99.0]])
    batch = batch_of(mask_of(4, 4, size=4), mask_of(3, 0, size=4))
    value = objective(terms_of(torch.zeros(2, 4), credit=credit), batch, replace(SETTINGS, weight=0.5))
    assert logged(value, "credit/mean") == pytest.approx((2 - 1 + 0.5) / 3)
    assert logged(value, "credit/positive_fraction") == pytest.approx(2 / 3)


def test_entropy_is_averaged_over_the_tokens_of_either_term():
    entropy = torch.tensor([[1.0, 2.0, 99.0], [4.0, 99.0, 99.0]])
    batch = batch_of(mask_of(1, 1, size=3), mask_of(2, 0, size=3))
    value = objective(terms_of(torch.zeros(2, 3), entropy=entropy), batch, replace(SETTINGS, weight=0.5))
    assert logged(value, "entropy") == pytest.approx((1 + 2 + 4) / 3)


def test_what_is_logged_holds_no_graph():
    logps = torch.zeros(1, 2, requires_grad=True)
    batch = batch_of(mask_of(2, size=2), old_logps=torch.zeros(1, 2), reference_logps=torch.zeros(1, 2))
    terms = terms_of(logps + 1, logps, entropy=logps.detach(), credit=logps.detach())
    value = objective(terms, batch, replace(SETTINGS, weight=0.5, beta=0.1))
    assert set(value.sums) == {
        DISTILLATION,
        POLICY,
        "kl",
        "entropy",
        "policy/clip_fraction",
        "credit/mean",
        "credit/positive_fraction",
    }
    assert value.loss.requires_grad
    for pair in value.sums.values():
        assert all(t.shape == () and not t.requires_grad for t in pair)


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("is_counted", [False, True])
def test_no_token_to_train_on_gives_zero_loss_and_zero_gradients(loss_type, weight: float, is_counted: bool):
    # All completions are truncated and out of the loss, yet attended to.
    logps = torch.full((2, 3), -1.0, requires_grad=True)
    nothing = mask_of(0, 0, size=3)
    batch = batch_of(nothing, advantages=torch.ones(2), old_logps=torch.zeros(2, 3), reference_logps=torch.zeros(2, 3))
    batch = replace(batch, counts=counts_of([batch])) if is_counted else batch
    settings = replace(SETTINGS, loss_type=loss_type, weight=weight, beta=0.1)
    value = objective(terms_of(logps.square(), logps, credit=logps.detach()), batch, settings)
    assert value.loss == 0
    value.loss.backward()
    assert logps.grad.tolist() == [[0.0] * 3] * 2
    assert all(numerator == 0 for numerator, _ in value.sums.values())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("garbage", [-math.inf, math.inf, math.nan])
def test_what_masked_tokens_hold_has_no_effect(loss_type, weight: float, garbage: float):
    settings = replace(SETTINGS, loss_type=loss_type, weight=weight, beta=0.1)
    mask = mask_of(3, 8, size=8)
    generator = torch.Generator().manual_seed(0)
    values = {name: -torch.rand(2, 8, generator=generator) for name in ("logps", "old", "reference", "other")}

    def run(fill: float) -> tuple[LossTerms, Tensor]:
        x = {name: torch.where(mask, v, fill) for name, v in values.items()}
        logps = x["logps"].requires_grad_()
        # The teacher's log-probs are masked where the divergence is computed.
        per_token = plain.sampled_token_kl(masked(logps, mask), masked(x["other"], mask))
        terms = terms_of(torch.where(mask, per_token, fill), logps, entropy=x["other"], credit=x["other"])
        batch = batch_of(
            mask, advantages=torch.tensor([1.0, -1.0]), old_logps=x["old"], reference_logps=x["reference"]
        )
        value = objective(terms, batch, settings)
        return value, torch.autograd.grad(value.loss, logps)[0]

    (clean, clean_grad), (dirty, dirty_grad) = run(0.0), run(garbage)
    assert dirty.loss == clean.loss
    assert torch.equal(dirty_grad, clean_grad)
    assert dirty.sums == clean.sums


def test_minus_inf_among_served_log_probs_on_padding_leaves_loss_and_gradient_finite():
    generator = torch.Generator().manual_seed(0)
    mask = mask_of(3, 8, size=8)
    student = torch.randn(2, 8, 4, generator=generator).log_softmax(-1).requires_grad_()
    teacher = torch.randn(2, 8, 4, generator=generator).log_softmax(-1)
    served = torch.where(mask.unsqueeze(-1), teacher, -math.inf)
    per_token = plain.kl(*(renormalize(masked(logps, mask)).exp() for logps in (student, served)))
    value = objective(terms_of(per_token), batch_of(mask), SETTINGS)
    close(value.loss, plain.kl(student.exp(), teacher.exp())[mask].mean())
    value.loss.backward()
    assert torch.isfinite(student.grad).all()


# --- a step is one step, however it is cut ---------------------------------------------------------------------------


class Step:
    """Eight rows and a linear student of them, in fp64, so that one gradient belongs to any cut into microbatches.

    Rows 1 and 2 have no context, row 5 is out of the policy term, row 6 of both; lengths differ.
    """

    num_rows, size, num_features, vocabulary = 8, 4, 3, 5

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.weight = draw(self.num_features, self.vocabulary)
        self.features = draw(self.num_rows, self.size, self.num_features)
        self.teacher_logps = draw(self.num_rows, self.size, self.vocabulary).log_softmax(-1)
        self.ids = torch.randint(self.vocabulary, (self.num_rows, self.size), generator=generator)
        mask = mask_of(4, 1, 2, 3, 1, 4, 2, 2, size=self.size)
        rows = torch.arange(self.num_rows).unsqueeze(-1)
        self.batch = batch_of(
            mask & (rows != 5) & (rows != 6),
            mask & (rows != 1) & (rows != 2) & (rows != 6),
            completion_mask=mask,
            advantages=draw(self.num_rows),
            old_logps=-draw(self.num_rows, self.size).abs(),
            reference_logps=-draw(self.num_rows, self.size).abs(),
        )

    def rows(self, rows: slice, columns: slice = slice(None)) -> TrainingBatch:
        """These rows and completion tokens as a microbatch."""
        values = {f.name: getattr(self.batch, f.name) for f in fields(TrainingBatch)}
        tensors = {name: value[rows] for name, value in values.items() if isinstance(value, Tensor)}
        wide = {name for name, t in tensors.items() if t.ndim == 2 and t.shape[1] == self.size}
        cut = {name: t[:, columns] if name in wide else t for name, t in tensors.items()}
        return replace(self.batch, counts=None, **cut)

    def run(self, parts: list[slice], settings: ObjectiveSettings) -> tuple[Tensor, Tensor, list[LossTerms]]:
        """Loss, gradient and what is logged of the step, as the sum over its microbatches."""
        weight = self.weight.clone().requires_grad_()
        microbatches = [self.rows(part) for part in parts]
        counts = counts_of(microbatches)
        values = []
        for part, batch in zip(parts, microbatches, strict=True):
            logps = (self.features[part] @ weight).log_softmax(-1)
            sampled = logps.gather(-1, self.ids[part].unsqueeze(-1)).squeeze(-1)
            per_token = plain.divergence(logps.exp(), self.teacher_logps[part].exp(), alpha=settings.alpha)
            value = objective(terms_of(per_token, sampled), replace(batch, counts=counts), settings)
            value.loss.backward()
            values.append(value)
        return sum(v.loss.detach() for v in values), weight.grad, values


CUTS = {
    "2 of 4": [slice(0, 4), slice(4, 8)],
    "8 of 1": [slice(i, i + 1) for i in range(8)],
    "uneven": [slice(0, 1), slice(1, 6), slice(6, 7), slice(7, 8)],
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_one_update_whatever_the_cut_into_microbatches(loss_type, level, weight: float, cut: str):
    settings = replace(
        SETTINGS, loss_type=loss_type, importance_sampling_level=level, weight=weight, alpha=0.5, beta=0.3
    )
    loss, grad, whole = Step().run([slice(0, 8)], settings)
    cut_loss, cut_grad, parts = Step().run(CUTS[cut], settings)
    assert loss != 0
    close(cut_loss, loss, atol=1e-12)
    close(cut_grad, grad, atol=1e-12)
    for name in whole[0].sums:
        assert logged(parts, name) == pytest.approx(logged(whole, name), abs=1e-12)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_logged_term_is_the_loss_of_the_step(loss_type, cut: str):
    loss, _, parts = Step().run(CUTS[cut], replace(SETTINGS, loss_type=loss_type))
    assert logged(parts, DISTILLATION) == pytest.approx(loss.item(), abs=1e-12)
    loss, _, parts = Step().run(CUTS[cut], replace(SETTINGS, loss_type=loss_type, weight=0.0))
    assert logged(parts, POLICY) == pytest.approx(loss.item(), abs=1e-12)


def test_dapo_weighs_short_and_long_completions_alike_in_one_batch_of_eight_and_two_of_four():
    # Four completions of 1 token, four of 16: the gradient at each of the 68 tokens is 1/68, however they are cut.
    mask = mask_of(1, 1, 1, 1, 16, 16, 16, 16, size=16)
    per_token = torch.zeros(8, 16, requires_grad=True)
    parts = [slice(0, 4), slice(4, 8)]
    counts = counts_of([batch_of(mask[part]) for part in parts])
    for part in parts:
        objective(terms_of(per_token[part]), batch_of(mask[part], counts=counts), SETTINGS).loss.backward()
    close(per_token.grad, mask / 68)


def test_without_counts_a_microbatch_is_its_own_step():
    step = Step()
    for loss_type in LOSS_TYPES:
        settings = replace(SETTINGS, loss_type=loss_type, weight=0.5)
        batch = step.batch
        terms = terms_of(torch.rand(8, 4, dtype=torch.float64), -torch.rand(8, 4, dtype=torch.float64))
        counted = objective(terms, replace(batch, counts=counts_of([batch])), settings)
        assert objective(terms, batch, settings).loss == counted.loss


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_masked_row_equals_a_removed_row(loss_type):
    per_token, mask = torch.rand(3, 4), mask_of(4, 0, 2, size=4)
    kept = torch.tensor([0, 2])
    settings = replace(SETTINGS, loss_type=loss_type)
    close(
        objective(terms_of(per_token), batch_of(mask), settings).loss,
        objective(terms_of(per_token[kept]), batch_of(mask[kept]), settings).loss,
    )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_padding_equals_absent(loss_type, level):
    step = Step()
    settings = replace(SETTINGS, loss_type=loss_type, importance_sampling_level=level, weight=0.5, beta=0.1)
    per_token, logps = torch.rand(2, 4, dtype=torch.float64), -torch.rand(2, 4, dtype=torch.float64)
    rows = slice(3, 5)  # of 3 and 1 tokens: the last column is padding
    assert not step.batch.completion_mask[rows, 3].any()
    padded = objective(terms_of(per_token, logps), step.rows(rows), settings)
    absent = objective(terms_of(per_token[:, :3], logps[:, :3]), step.rows(rows, slice(0, 3)), settings)
    close(padded.loss, absent.loss, atol=1e-12)
    for name in padded.sums:
        assert logged(padded, name) == pytest.approx(logged(absent, name), abs=1e-12)


def test_a_fraction_of_nothing_has_no_denominator():
    nothing = mask_of(0, 0, size=3)
    for loss_type, expected in {"dapo": 0, "grpo": 0, "dr_grpo": 0, "bnpo": 1}.items():
        fraction = loss_fraction(torch.ones(2, 3), nothing, loss_type=loss_type, max_completion_length=5)
        assert [x.item() for x in fraction] == [0, expected]
