"""Mathematical answers: what is read from an attempt, what is equal, and what the feedback says."""

import threading
import time

import pytest

from sdpo.rewards import MathReward, RewardScorer, math_reward
from sdpo.types import Completion, Rollout, Score


def score(text, gold, *, is_cut=False, **settings):
    [result] = MathReward(**settings)(["Q"], [text], [[1]], answer=[gold], is_truncated=[is_cut])
    return result


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (r"so \boxed{42}", "42"),
        (r"so \boxed{42}", 42),
        (r"so \boxed{42}", "6 * 7 is it\n#### 42"),
        (r"so \boxed{42}", r"thus $\boxed{42}$."),
        (r"so \boxed{42}", "#### Step 1: multiply\nthus $\\boxed{42}$."),  # a heading of Markdown
        ("##### Step 1: multiply\nIt is 42.", "42"),
        ("6 * 7 = 42\n#### 42.", "42"),
        (r"so \boxed{1,234}", "#### 1234"),
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        (r"\boxed{\dfrac{2}{4}}", 0.5),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}"),
        (r"\boxed{(x+1)^2}", "$x^2 + 2x + 1$"),
        (r"\boxed{\text{Monday}}", r"\text{Monday}"),
        (r"\boxed{$18.00}", "18"),
        ("6 * 7 = 42\n#### 42", "42"),
        ("It is 6 * 7 = 42.", "42"),
        (r"the answer is $\frac{84}{2}$", "42"),
        (r"\boxed{41}, no: \boxed{42}", "42"),  # the last one counts
        (r"<think>\boxed{41}</think> \boxed{42}", "42"),
        (r"\boxed{0.0000001}", 1e-7),
    ],
)
def test_equal_answers_have_reward_1_and_no_feedback(text, gold):
    assert score(text, gold) == Score(1.0)


@pytest.mark.parametrize(
    ("text", "gold", "feedback"),
    [
        (r"\boxed{43}", "42", "The final answer 43 is wrong."),
        (r"\boxed{\frac{86}{2}}", "42", r'The final answer "\frac{86}{2}", which is read as 43, is wrong.'),
        ("it is 43", "42", "The final answer 43 is wrong."),
        ("so 0.25.", "42", "The final answer 0.25 is wrong."),
        ("so $x = 7$.", "42", 'The final answer "x = 7", which is read as Eq(x, 7), is wrong.'),
        (r"\boxed{42} or \boxed{43}", "42", "The final answer 43 is wrong."),
        (r"\boxed{42, 43}", "42", 'The final answer "42, 43", which is read as {42, 43}, is wrong.'),
        (
            "I do not know.",
            "42",
            "There is no final answer. Give it in \\boxed{} or after #### or as the last number.",
        ),
        ("", "42", "There is no final answer. Give it in \\boxed{} or after #### or as the last number."),
        (r"\boxed{}", "42", "The final answer \\boxed{} is empty."),
        (r"so \boxed{\frac{1}{", "42", r"The box of the final answer is not closed: \boxed{\frac{1}{"),
        (r"\boxed{\frac{1}{2}", "42", r"The box of the final answer is not closed: \boxed{\frac{1}{2}"),
        (r"\boxed{#}", "42", 'The final answer "#" cannot be read as a number or formula.'),
        ("text\n####", "42", "There is nothing after ####."),
    ],
)
def test_feedback_says_what_is_wrong_and_not_what_is_right(text, gold, feedback):
    assert score(text, gold) == Score(0.0, feedback)
    assert "42" in text or "42" not in score(text, gold).feedback


def test_the_right_answer_is_shown_only_where_it_is_asked_for():
    assert (
        score(r"\boxed{43}", "#### 42", show_answer=True).feedback
        == "The final answer 43 is wrong. The right one is 42."
    )


@pytest.mark.parametrize("text", ["First 6 * 7 = 42", "so\n#### 42", "<think>it is 42"])
def test_an_attempt_that_was_cut_has_an_answer_only_where_it_is_whole(text):
    cut = Score(0.0, "The answer was cut off at the length limit before it came to a final answer.")
    assert score(text, "42", is_cut=True) == cut
    assert score(r"so \boxed{42}, sin", "42", is_cut=True) == Score(1.0)
    assert score("#### 42\nsin", "42", is_cut=True) == Score(1.0)


def test_only_the_forms_that_are_asked_for_are_read():
    missing = Score(0.0, "There is no final answer. Give it in \\boxed{}.")
    for text in ("42", "#### 42"):
        assert score(text, "42", forms=["boxed"]) == missing
    assert score("#### 42\n\\boxed{43}", "42", forms=["####", "boxed"]) == Score(1.0)
    with pytest.raises(ValueError, match="forms is 'boxed'"):
        MathReward(forms="boxed")


def test_rows_without_an_answer_and_columns_of_other_names():
    assert math_reward(["Q"] * 2, ["1", "1"], answer=[None, "1"]) == [Score(None), Score(1.0)]
    assert math_reward(["Q"], ["1"], solution=[r"\boxed{1}"]) == [Score(1.0)]
    assert MathReward(answer_column="gold")(["Q"], ["1"], gold=["1"]) == [Score(1.0)]
    with pytest.raises(
        ValueError, match=r"no column 'answer', where the right answers are looked for; it has \['gold'\]"
    ):
        math_reward(["Q"], ["1"], gold=["1"])
    for wrong in ("", " ", "####", r"\boxed{}", r"\boxed{1", float("nan"), True, [1]):
        with pytest.raises(ValueError, match="answer of row 1"):
            math_reward(["Q"] * 2, ["1"] * 2, answer=["1", wrong])


def test_integers_are_judged_as_math_verify_judges_them():
    # Of two integers it is not asked; a decimal point makes that it is.
    pairs = [("42", "42"), ("-42", "42"), ("042", "42"), ("0", "-0")]
    plain = [score(rf"\boxed{{{a}}}", g).reward for a, g in pairs]
    asked = [score(rf"\boxed{{{a}.0}}", g).reward for a, g in pairs]
    assert plain == asked == [1.0, 0.0, 1.0, 1.0]


HOSTILE = [
    r"\boxed{9^{9^{9^{9}}}}",
    "it is 9^9^9^9",
    r"\boxed{(10^{10})!}",
    rf"\boxed{{{'(' * 5000}1{')' * 5000}}}",
    rf"\boxed{{{'9' * 100_000}}}",
]


def test_answers_that_never_end_are_given_up_and_the_others_are_judged():
    texts = [r"\boxed{\frac{84}{2}}", *HOSTILE, r"\boxed{\frac{84}{2}}"]
    start = time.monotonic()
    scores = MathReward(seconds=1, num_workers=4)(["Q"] * 7, texts, answer=["42"] * 7)
    assert [s.reward for s in scores] == [1.0, *[0.0] * 5, 1.0]
    assert (
        'The final answer "9^{9^{9^{9}}}" is no simple value: to compare it took more than 1 s.' in scores[1].feedback
    )
    assert all(len(s.feedback) < 600 for s in scores[1:-1])
    assert time.monotonic() - start < 30


def test_it_works_in_a_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(score(r"\boxed{\frac{84}{2}}", "42")))
    thread.start()
    thread.join()
    assert results == [Score(1.0)]


def test_the_scorer_says_what_was_cut_and_takes_chats():
    arguments = {"chat_template_kwargs": {}, "model_init_kwargs": None, "trust_remote_code": False, "device": "cpu"}
    scorer = RewardScorer(math_reward, reward_weights=None, **arguments)
    state = type("State", (), {"global_step": 0})
    prompt = [{"role": "user", "content": "Q"}]
    rows = [Rollout(0, prompt, [1], Completion([1], is_truncated=cut), "It is 42") for cut in (False, True)]
    scored = scorer.score(rows, [{"prompt": prompt, "answer": 42}] * 2, trainer_state=state)
    assert [row.rewards for row in scored] == [{"math_reward": 1.0}, {"math_reward": 0.0}]
    assert scored[1].feedback.startswith("The answer was cut off at the length limit")
