"""Rows to tensors."""

from __future__ import annotations

import pytest

from sdpo.collate import lay_out, teacher_context_tensors


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
