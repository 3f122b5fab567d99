"""Tasks of reasoning-gym: their questions as rows, their scores as rewards, and answers that they would evaluate."""

import json
import time

import pytest

from sdpo.rewards import ReasoningGymReward, reasoning_gym_dataset, reasoning_gym_reward
from sdpo.rewards.reasoning_gym import find_answer
from sdpo.rewards.reasoning_gym_verdict import decode, encode
from sdpo.rewards.workers import fork_level
from sdpo.types import Score

pytest.importorskip("reasoning_gym")
pytestmark = pytest.mark.skipif(fork_level() is None, reason="no way to confine a process works here")


def right_answer(row):
    return json.loads(row["entry"])["entry"]["answer"]


def score(row, *texts, is_cut=False, **settings):
    function = ReasoningGymReward(**{"seconds": 1, **settings})
    given = {"entry": [row["entry"]] * len(texts), "is_truncated": [is_cut] * len(texts)}
    return function(["Q"] * len(texts), list(texts), [[1]] * len(texts), **given)


@pytest.fixture(scope="module")
def sum_row():
    return reasoning_gym_dataset("chain_sum", 2, seed=3, min_terms=2, max_terms=2)[1]


@pytest.fixture(scope="module")
def matrix_row():
    """Of a task that hands the answer to `eval`."""
    return reasoning_gym_dataset("spiral_matrix", 1)[0]


def test_rows_are_the_tasks_own_and_the_same_for_a_seed():
    import reasoning_gym

    rows = reasoning_gym_dataset("chain_sum", 3, seed=7, max_terms=3)
    [_, entry, _] = reasoning_gym.create_dataset("chain_sum", seed=7, size=3, max_terms=3)
    instruction = "Give the final answer, and nothing else, between <answer> and </answer>."
    assert rows[1]["prompt"] == [{"role": "user", "content": f"{entry['question']}\n\n{instruction}"}]
    assert right_answer(rows[1]) == entry["answer"]
    assert rows[:] == reasoning_gym_dataset("chain_sum", 3, seed=7, max_terms=3)[:]
    assert rows["entry"][:] != reasoning_gym_dataset("chain_sum", 3, seed=8, max_terms=3)["entry"][:]
    bare = reasoning_gym_dataset("chain_sum", 3, seed=7, max_terms=3, instruction="")
    assert bare[1]["prompt"][0]["content"] == entry["question"]


def test_a_right_answer_has_reward_1_and_a_wrong_one_is_named(sum_row):
    right = right_answer(sum_row)
    scores = score(
        sum_row,
        f"<think>7</think>It is <answer>\n{right}\n</answer>.",
        f"So\nThe answer is: {right}",
        "<answer>no number</answer>",
        "",
    )
    assert scores == [
        Score(1.0),
        Score(1.0),
        Score(0.0, 'The answer "no number" is wrong.'),
        Score(0.0, "There is no answer. Give it between <answer> and </answer>."),
    ]


def test_an_attempt_that_was_cut_has_an_answer_only_in_closed_tags(sum_row):
    right = right_answer(sum_row)
    texts = (f"<answer>{right}</answer> becau", f"<answer>{right}", f"so\n{right}")
    cut = Score(0.0, "The answer was cut off at the length limit before it came to a final answer.")
    assert score(sum_row, *texts, is_cut=True) == [Score(1.0), cut, cut]


def test_a_partial_score_is_a_reward_and_said():
    # Of a wrong result from other numbers: 0.05, by countdown's own scale.
    row = reasoning_gym_dataset("countdown", 1)[0]
    assert score(row, "<answer>1 + 1</answer>") == [
        Score(0.05, 'The answer "1 + 1" is not right: it scores 0.05 of 1.')
    ]


def test_the_entries_of_every_task_come_back_as_they_were():
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    for name in sorted(DATASETS.keys() - {"composite"}):
        task = reasoning_gym.create_dataset(name, size=1, seed=1)
        [entry] = task
        again = decode(json.loads(json.dumps(encode(entry))))
        assert again == entry, name
        if entry["answer"] is not None:
            assert task.score_answer(entry["answer"], again) == 1.0, name


def test_answers_that_are_programs_do_no_harm_and_take_no_time(matrix_row, tmp_path, monkeypatch):
    monkeypatch.setattr("sdpo.rewards.workers._CLOCK_FACTOR", 2)
    made = tmp_path / "made"
    start = time.monotonic()
    scores = score(
        matrix_row,
        f"<answer>{right_answer(matrix_row)}</answer>",
        f"<answer>open({str(made)!r}, 'w')</answer>",
        "<answer>__import__('os').system('true')</answer>",
        "<answer>__import__('os')._exit(0)</answer>",
        "<answer>[0 for _ in iter(int, 1)]</answer>",
        "<answer>__import__('time').sleep(99)</answer>",
        num_workers=4,
    )
    assert [s.reward for s in scores] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert not made.exists()
    assert scores[3].feedback == """The answer "__import__('os')._exit(0)" cannot be read."""
    assert scores[5].feedback == """The answer "__import__('time').sleep(99)" took more than 1 s to score."""
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer> <answer>2</answer>", ("2", True)),
        ("<answer>2", ("2", False)),
        ("<answer></answer>", (None, True)),
        ("so\nFinal answer: 2", ("2", False)),
        ("the answer is 2", ("2", False)),
        ("answering 2", ("answering 2", False)),
        ("2", ("2", False)),
        ("", (None, False)),
    ],
)
def test_the_answer_is_in_the_last_tags_or_the_last_line(text, answer):
    assert find_answer(text) == answer


def test_what_cannot_be_read_is_an_error(sum_row):
    assert reasoning_gym_reward(["Q"], ["1"], entry=[None]) == [Score(None)]
    with pytest.raises(ValueError, match=r"'chain_sun' is no task\. Did you mean 'chain_sum'\?"):
        reasoning_gym_dataset("chain_sun", 1)
    with pytest.raises(ValueError, match="'composite' holds several tasks"):
        reasoning_gym_dataset("composite", 1)
    with pytest.raises(ValueError, match="no column 'entry'"):
        reasoning_gym_reward(["Q"], ["1"])
    for wrong in ("{", "{}", {"task": "chain_sum"}):
        with pytest.raises(ValueError, match=r"entry of row 1 .*make the rows with reasoning_gym_dataset"):
            reasoning_gym_reward(["Q"] * 2, ["1"] * 2, entry=[sum_row["entry"], wrong])
    with pytest.raises(ValueError, match="level 'isolated' is for programs"):
        ReasoningGymReward(level="isolated")


def test_without_any_confinement_nothing_is_scored_unless_it_is_trusted(sum_row, monkeypatch):
    monkeypatch.setattr("sdpo.rewards.reasoning_gym.fork_level", lambda: None)
    with pytest.raises(RuntimeError, match="no way to confine that works"):
        score(sum_row, "1")
    assert score(sum_row, right_answer(sum_row), level="limited") == [Score(1.0)]
