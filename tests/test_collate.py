"""Rows to tensors."""

from __future__ import annotations

import math

import pytest
import torch

from sdpo.collate import collate, lay_out, teacher_context_tensors
from sdpo.types import Completion, Rollout, Row, ScoredRollout, TeacherContext, TrainingBatch


def test_a_sequence_without_a_prompt_is_refused() -> None:
    """Nothing would predict its first token: the position before it belongs to another sequence."""
    with pytest.raises(AssertionError, match="one before it"):
        lay_out([[5], []], [[6], [7]], [[0], [1]], pad_token_id=0)


def test_the_token_before_each_token_predicts_it() -> None:
    # ids 5 6 7 | 8 9 <pad>: the flat places of the tokens before 6 7 and before 9
    found = lay_out([[5], [8]], [[6, 7], [9]], [[0], [1]], pad_token_id=0)
    assert found.ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert found.predictors.tolist() == [[0, 1], [3, 0]]


def test_no_rows_are_tensors_of_no_rows() -> None:
    assert {len(tensor) for tensor in teacher_context_tensors([], pad_token_id=0).values()} == {0}


def row_of(ids: list[int], sampled_logps: list[float] | None) -> Row:
    rollout = Rollout(0, "p", [1, 2], Completion(ids, False, sampled_logps), "c")
    return Row(ScoredRollout(rollout, {}, 1.0, None), TeacherContext(), [1, 2], False, 0.5)


def collated(rows: list[Row]) -> TrainingBatch:
    return collate(rows, pad_token_id=0, mask_truncated_completions=False, weight=0.5, token_cost=None)


@pytest.mark.parametrize(("weight", "student"), [(1.0, (1, 1)), (0.5, (2, 5))])
def test_where_no_row_has_a_loss_one_token_is_read(weight: float, student: tuple[int, int]) -> None:
    """Two rows of 2 + 3 tokens without a context; at weight 0.5 the policy term trains on both."""
    batch = collate(
        [row_of([5, 6, 7], None)] * 2,
        pad_token_id=0,
        mask_truncated_completions=False,
        weight=weight,
        token_cost=None,
    )
    assert batch.student.ids.shape == student and batch.teacher.ids.shape == (1, 1)
    assert batch.teacher.predictors.tolist() == [[0, 0, 0]] * 2


def test_the_log_probs_of_the_sampler_are_padded_with_zeros_and_kept_as_they_are() -> None:
    batch = collated([row_of([5, 6, 7], [-0.5, -math.inf, math.nan]), row_of([8], [-0.25])]).to("cpu")
    assert batch.sampled_logps is not None and batch.sampled_logps.dtype == torch.float32
    expected = torch.tensor([[-0.5, -math.inf, math.nan], [-0.25, 0.0, 0.0]])
    assert torch.equal(batch.sampled_logps.nan_to_num(), expected.nan_to_num())
    assert batch.sampled_logps.shape == batch.completion_ids.shape
    meta = batch.to("meta").sampled_logps
    assert meta is not None and meta.is_meta


@pytest.mark.parametrize("sampled", [None, [-0.25]])
def test_there_are_none_unless_every_row_has_them(sampled: list[float] | None) -> None:
    assert collated([row_of([5], sampled), row_of([6], None)]).sampled_logps is None


def test_log_probs_of_another_number_than_the_tokens_are_refused() -> None:
    with pytest.raises(AssertionError, match="one log-prob a token"):
        collated([row_of([5, 6], [-0.5]), row_of([6], [-0.1])])
