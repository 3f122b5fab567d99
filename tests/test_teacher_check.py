"""Whether the comparison of teacher and student says what was sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TrainerFactory

from sdpo import Score, compare_teacher
from sdpo.teacher_check import Estimate


def reward_good(completions: list[str], **_: Any) -> list[Score]:
    return [Score(1.0) if "w1" in text.split() else Score(0.0, "w30") for text in completions]


def test_a_mean_over_questions_has_their_standard_error() -> None:
    # mean 0.5, variance ((0.5)^2 + 0 + (0.5)^2) / 2 = 0.25, standard error sqrt(0.25 / 3) = 0.288675
    estimate = Estimate.of([0.0, 0.5, 1.0])
    assert (estimate.mean, estimate.num_questions) == (0.5, 3)
    assert estimate.standard_error == pytest.approx(0.288675, abs=1e-6)
    assert estimate.interval == pytest.approx((0.5 - 1.96 * 0.288675, 0.5 + 1.96 * 0.288675), abs=1e-5)


def test_teacher_and_student_are_compared_on_the_same_questions(make_trainer: TrainerFactory) -> None:
    """Two questions of four attempts: the first has one success of four, the second none."""
    student = ["w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8"]
    again = ["w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8"]
    # 3 demonstrations, which is what the run shows; feedback for 7 failures; both for 3
    teacher = ["w1", "w1", "w9", "w1", *["w9"] * 6, *["w9"] * 3]
    trainer = make_trainer(
        script=[*student, *again, *teacher],
        reward_funcs=reward_good,
        prompts=["w10 w11", "w12 w13"],
        per_device_train_batch_size=8,
    )
    found = compare_teacher(trainer, num_prompts=2)
    assert (found.student.mean, found.mixed_groups.mean) == (0.125, 0.5)
    assert found.run is not None and found.run.teacher.mean == pytest.approx(2 / 3)
    assert found.run.student.mean == 0.25 and found.run.gain.mean == pytest.approx(2 / 3 - 0.25)
    assert found.by_context["demonstration"] is found.run
    feedback = found.by_context["feedback"]
    assert feedback is not None and feedback.teacher.mean == pytest.approx((1 / 3 + 0) / 2)
    assert "teacher, as in the run" in str(found)


def test_the_sample_that_chooses_the_questions_is_not_the_one_that_is_compared(make_trainer: TrainerFactory) -> None:
    """A teacher as good as the student gains nothing, though only questions with a success are compared.

    Of two questions the first has 1 success of 4 and is compared. Its second sample has none, the teacher's 3 answers
    none: the gain is 0 - 0, not 0 - 1/4.
    """
    first, second = ["w1", "w2", "w2", "w2", *["w2"] * 4], ["w2"] * 8
    trainer = make_trainer(
        script=[*first, *second, *["w9"] * 20],
        reward_funcs=reward_good,
        prompts=["w10 w11", "w12 w13"],
        per_device_train_batch_size=8,
    )
    found = compare_teacher(trainer, num_prompts=2)
    assert found.student.mean == 0.125  # over all questions, so nothing was chosen
    assert found.run is not None and (found.run.student.mean, found.run.gain.mean) == (0.0, 0.0)


def test_it_warns_where_the_teacher_is_no_better_or_there_is_none(
    make_trainer: TrainerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    compare_teacher(
        make_trainer(reward_funcs=reward_good, script=["w1", "w2", "w2", "w2", "w1", "w2", "w2", "w2", *["w9"] * 9]),
        num_prompts=1,
    )
    assert "not clearly better" in caplog.text
    caplog.clear()
    found = compare_teacher(make_trainer(reward_funcs=reward_good, script=["w2"]), num_prompts=1)
    assert found.run is None and "nothing to learn" in caplog.text
    with pytest.raises(ValueError, match="at least one row"):
        compare_teacher(make_trainer(), dataset=[])


def test_a_context_that_does_not_fit_is_not_counted(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(reward_funcs=reward_good, script=["w1", "w2", "w2", "w2"], max_reprompt_len=3)
    assert compare_teacher(trainer, num_prompts=1).run is None


def test_the_runs_random_state_is_left_alone(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(script=None, reward_funcs=reward_good)
    before = torch.get_rng_state()
    compare_teacher(trainer, num_prompts=1)
    assert torch.equal(torch.get_rng_state(), before)
