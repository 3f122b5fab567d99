"""Questions with choices: which letter an attempt decides for, and what the feedback says."""

import pytest

from sdpo.rewards import MultipleChoiceReward, multiple_choice_reward
from sdpo.rewards.multiple_choice import chosen_letters
from sdpo.types import Score

CITIES = ["Paris", "Rome", "42 streets"]


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("The answer is (B)", "B"),
        ("the answer is (b).", "B"),
        ("**Answer:** B", "B"),
        ("The correct answer is **(C) 42 streets**, not A.", "C"),
        ("The correct option is B because it is large.", "B"),
        ("Option A is wrong. C is right", "C"),
        (r"So $\boxed{B}$", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{(B) Rome}", "B"),
        (r"\boxed{Rome}", "B"),
        ("It is large.\n\nB", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("B) Rome", "B"),
        ("Thinking of it:\nrome.", "B"),
        ("Look at option A: no.\n\nC", "C"),
        ("The answer is A.\nNo, the answer is B.", "B"),  # the last line that decides
        (r"\boxed{A} and then \boxed{B}", "AB"),
        ("The answer is (A) or (C)", "AC"),
        ("The answer is A, B, and C.", "ABC"),
        ("A, B", "AB"),
        ("Final answer: F", "F"),
        ("I do not know", ""),
        ("The answer is a number.", ""),
        ("The answer is A good one", ""),
        ("Answer: I think of Rome", ""),
        ("The answer is Carbon", ""),
        ("A. is wrong", ""),
        ("", ""),
    ],
)
def test_the_letter_that_an_attempt_decides_for(text, letters):
    assert chosen_letters(text, CITIES) == set(letters)


@pytest.mark.parametrize(
    ("text", "letters"),
    [("The answer is B", ""), ("It is\nB", ""), ("The answer is B.", "B"), (r"\boxed{B} as", "B"), ("Rome", "")],
)
def test_the_end_of_an_attempt_that_was_cut_may_be_half_a_word(text, letters):
    assert chosen_letters(text, CITIES, is_cut=True) == set(letters)


@pytest.mark.parametrize("answer", ["B", "b", "(B)", 1, "Rome", "rome"])
@pytest.mark.parametrize("choices", [CITIES, {"text": CITIES, "label": ["A", "B", "C"]}])
def test_the_right_choice_is_a_letter_an_index_or_a_text(answer, choices):
    scores = multiple_choice_reward(["Q"] * 2, ["B", "A"], [[1]] * 2, answer=[answer] * 2, choices=[choices] * 2)
    assert scores == [Score(1.0), Score(0.0, "A is not the right choice.")]


@pytest.mark.parametrize(
    ("text", "is_cut", "feedback"),
    [
        ("No idea.", False, 'No choice was found. End with "The answer is (X)", X being a letter from A to C.'),
        ("No idea.", True, "The answer was cut off at the length limit before it named a choice."),
        ("A or B", False, "Several choices were named at the end: A, B. Decide for one."),
        ("E", False, "There is no choice E; the choices are A to C."),
        ("C", False, "C is not the right choice."),
    ],
)
def test_feedback_says_what_is_wrong_and_not_what_is_right(text, is_cut, feedback):
    given = {"answer": ["B"], "choices": [CITIES], "is_truncated": [is_cut]}
    assert multiple_choice_reward(["Q"], [text], **given) == [Score(0.0, feedback)]
    shown = MultipleChoiceReward(show_answer=True)(["Q"], [text], **given)
    assert shown == [Score(0.0, f"{feedback} The right one is B.")]


def test_rows_without_choices_and_without_an_answer():
    assert multiple_choice_reward(["Q"] * 2, ["J", "x"], answer=["J", None]) == [Score(1.0), Score(None)]
    assert (
        multiple_choice_reward(["Q"], ["K"], answer=["J"])[0].feedback
        == "There is no choice K; the choices are A to J."
    )


@pytest.mark.parametrize("answer", ["D", 3, -1, "London", True, 1.0, ""])
def test_an_answer_that_is_none_of_the_choices_is_an_error(answer):
    with pytest.raises(ValueError, match=r"answer of row 1 is .*; give a letter from A to C"):
        multiple_choice_reward(["Q"] * 2, ["A"] * 2, answer=["A", answer], choices=[CITIES] * 2)
    with pytest.raises(ValueError, match="11 choices; at most 10 have a letter"):
        multiple_choice_reward(["Q"], ["A"], answer=["A"], choices=[list("abcdefghijk")])
