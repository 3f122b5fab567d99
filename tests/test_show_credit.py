"""scripts/show_credit.py: the credit it prints is the one that a run logs."""

from __future__ import annotations

import pytest
from conftest import TrainerFactory

from scripts.show_credit import attempts, credit, transcript


def test_its_credit_is_that_of_the_first_step(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(rewards=(1.0, 0.0, 0.0, 0.0))
    found = attempts(trainer, num_questions=1)
    # the first answer succeeds and has no other success to be shown
    assert [attempt.context.demonstration_text for attempt in found] == ["", "w1 w2 w3", "w1 w2 w3", "w1 w2 w3"]
    values = [credit(trainer, attempt) for attempt in found]
    assert values[0].tolist() == [0.0] * 4  # three words and the end token, with the same prompt on both sides
    taught = [value for row in values[1:] for value in row.tolist()]
    trainer.train()
    assert trainer.state.log_history[0]["credit/mean"] == pytest.approx(sum(taught) / len(taught), abs=1e-5)


def test_the_transcript_has_a_column_a_token(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(prompts=[[{"role": "user", "content": "w10 w11"}]])
    attempt = attempts(trainer, num_questions=1)[1]
    lines = dict(line.split(maxsplit=1) for line in transcript(trainer, attempt).splitlines())
    assert lines["question"] == "w10 w11"
    assert lines["attempt"] == "w4 w5   (reward 0)"
    assert lines["sibling"] == "w1 w2 w3"
    assert lines["tokens"].split() == ["w4", "w5", "<eos>"]
    assert [float(value) for value in lines["credit"].split()] == [
        round(value, 1) for value in credit(trainer, attempt).tolist()
    ]
