"""Demonstrations, feedback and the teacher's prompt."""

import copy
from dataclasses import replace

import pytest

from sdpo.demonstrations import EarlierSuccesses, remove_thinking
from sdpo.reprompt import (
    CUT_MARKER,
    build_teacher_contexts,
    content_text,
    context_metrics,
    fit_teacher_prompt,
    teacher_prompt,
    with_question,
)
from sdpo.types import Completion, RepromptSettings, Rollout, ScoredRollout, TeacherContext

SETTINGS = RepromptSettings(
    use_successful_as_teacher=True,
    demonstration_selection="first",
    demonstration_buffer_size=0,
    demonstration_column="worked",
    success_reward_threshold=1.0,
    dont_reprompt_on_self_success=True,
    max_reprompt_len=10240,
    reprompt_template="{prompt}{solution}{feedback}\nSolve it.",
    solution_template="\nSolution: {successful_previous_attempt}",
    feedback_template="\nFeedback: {feedback_raw}",
    include_environment_feedback=True,
    environment_feedback_only_without_solution=False,
    remove_thinking_from_demonstration=False,
)


def row(reward, *, text="answer", feedback=None, group=0, prompt="Q", num_tokens=1, solution=None, question=None):
    rollout = Rollout(group, prompt, [1], Completion([2] * num_tokens, is_truncated=False), text)
    return ScoredRollout(rollout, {"f": reward}, reward, feedback, solution, question)


def contexts(*rewards, settings=SETTINGS, **kwargs):
    return build_teacher_contexts([row(reward, **kwargs) for reward in rewards], settings)


def words(prompt):
    """A stand-in for a tokenizer that charges one token a character."""
    return len(prompt) if isinstance(prompt, str) else sum(len(content_text(m["content"])) + 5 for m in prompt)


# --- contexts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_dont", "mask"), [(True, [0, 1, 1, 1]), (False, [1, 1, 1, 1])])
def test_the_only_success_of_a_group_is_no_demonstration_of_itself(is_dont, mask):
    settings = replace(SETTINGS, dont_reprompt_on_self_success=is_dont)
    assert [c.is_informative for c in contexts(1, 0, 0, 0, settings=settings)] == mask


def test_the_demonstration_is_the_first_other_success():
    rows = [row(0, text="a"), row(1, text="b"), row(1, text="c"), row(0, text="d")]
    result = build_teacher_contexts(rows, SETTINGS)
    assert [(c.demonstration, c.demonstration_text) for c in result] == [(1, "b"), (2, "c"), (1, "b"), (1, "b")]


def test_groups_may_be_interleaved_and_never_share_a_demonstration():
    rows = [row(0, group=7), row(1, group=3), row(0, group=3), row(0, group=7)]
    assert [c.demonstration for c in build_teacher_contexts(rows, SETTINGS)] == [None, None, 1, None]


def test_a_reward_at_the_threshold_is_a_success_and_none_never_is():
    settings = replace(SETTINGS, success_reward_threshold=-5.0)
    assert [c.demonstration for c in contexts(None, -5.0, -5.1, settings=settings)] == [1, None, 1]


def test_without_use_successful_as_teacher_nothing_is_demonstrated():
    settings = replace(SETTINGS, use_successful_as_teacher=False)
    assert contexts(1, 0, settings=settings) == [TeacherContext(), TeacherContext()]


def test_each_failure_is_told_its_own_feedback_and_the_success_is_not():
    rows = [row(r, feedback=f"about {i}") for i, r in enumerate([1, 0, 0, None])]
    assert [c.feedback for c in build_teacher_contexts(rows, SETTINGS)] == ["", "about 1", "about 2", "about 3"]


def test_a_success_is_not_told_feedback_even_where_it_has_no_demonstration():
    settings = replace(SETTINGS, use_successful_as_teacher=False)
    assert contexts(1, feedback="wrong", settings=settings) == [TeacherContext()]


def test_feedback_is_not_used_unless_asked_for():
    settings = replace(SETTINGS, include_environment_feedback=False)
    assert [c.feedback for c in contexts(0, 0, feedback="no", settings=settings)] == ["", ""]


@pytest.mark.parametrize("blank", [None, "", " \n\t"])
def test_blank_feedback_is_none(blank):
    assert contexts(0, feedback=blank) == [TeacherContext()]


def test_feedback_only_without_solution():
    settings = replace(SETTINGS, environment_feedback_only_without_solution=True)
    rows = [row(1, feedback="x"), row(0, feedback="y"), row(0, feedback="z", group=1)]
    assert [c.feedback for c in build_teacher_contexts(rows, settings)] == ["", "", "z"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a\nb</think>\n\n4", "4"),
        ("a\nb</think>\n4\n", "4"),  # the chat template opened the block
        ("4 <think>never closed", "4"),
        ("<think>never closed", ""),
        ("<think>a</think>4<think>b</think>5", "45"),
        ("a</think>4<think>b</think>5<think>c", "45"),
        (" 4 ", "4"),
        ("a < b </thinking>", "a < b </thinking>"),
    ],
)
def test_remove_thinking(text, expected):
    assert remove_thinking(text) == expected


def test_thinking_is_removed_only_on_request_and_a_success_left_empty_is_passed_over():
    rows = [row(1, text="<think>only"), row(1, text="<think>a</think> 4 "), row(0)]
    assert build_teacher_contexts(rows, SETTINGS)[2].demonstration_text == "<think>only"
    result = build_teacher_contexts(rows, replace(SETTINGS, remove_thinking_from_demonstration=True))
    assert (result[2].demonstration, result[2].demonstration_text) == (1, "4")
    assert result[1].demonstration is None


@pytest.mark.parametrize(("how", "shown"), [("first", "a"), ("shortest", "b"), ("best", "c")])
def test_which_of_several_successes_is_shown(how, shown):
    rows = [row(1, text="a", num_tokens=3), row(1, text="b", num_tokens=2), row(2, text="c", num_tokens=4), row(0)]
    result = build_teacher_contexts(rows, replace(SETTINGS, demonstration_selection=how))
    assert result[3].demonstration_text == shown
    assert result["abc".index(shown)].demonstration_text != shown, "not its own"


def test_a_random_success_is_any_of_them_and_the_same_for_one_seed():
    rows = [row(1, text="a"), row(1, text="b"), row(1, text="c"), row(0)]
    settings = replace(SETTINGS, demonstration_selection="random")
    shown = [build_teacher_contexts(rows, settings, seed=seed)[3].demonstration for seed in range(300)]
    # 100 each are expected; 60 are 4.9 standard deviations below: sqrt(300 * 1/3 * 2/3) = 8.2
    assert all(shown.count(i) > 60 for i in range(3))
    assert shown[:9] == [build_teacher_contexts(rows, settings, seed=seed)[3].demonstration for seed in range(9)]


def test_a_solution_of_the_dataset_is_shown_where_no_sibling_succeeded():
    rows = [
        row(1, text="mine", solution="gold"),
        row(0, solution="gold"),
        row(0, group=1),
        row(0, group=2, solution=" "),
    ]
    result = build_teacher_contexts(rows, SETTINGS)
    assert [(c.source, c.demonstration, c.demonstration_text) for c in result] == [
        ("column", None, "gold"),
        ("sibling", 0, "mine"),
        (None, None, ""),
        (None, None, ""),
    ]
    assert build_teacher_contexts(rows, replace(SETTINGS, demonstration_column=None))[0].source is None
    alone = build_teacher_contexts(rows, replace(SETTINGS, use_successful_as_teacher=False))
    assert [c.source for c in alone] == ["column", "column", None, None]


def test_a_solution_of_the_dataset_counts_as_one_for_the_feedback():
    settings = replace(SETTINGS, environment_feedback_only_without_solution=True)
    rows = [row(0, feedback="x", solution="gold"), row(0, feedback="y")]
    assert [c.feedback for c in build_teacher_contexts(rows, settings)] == ["", "y"]


def test_an_earlier_success_of_the_same_prompt_is_shown_before_the_solution_of_the_dataset():
    earlier = EarlierSuccesses(2)
    settings = replace(SETTINGS, demonstration_buffer_size=2)
    earlier.add([row(1, text=text, prompt="Q") for text in "abc"] + [row(0, prompt="R", group=1)], settings)
    rows = [row(0, prompt="Q", solution="gold"), row(0, prompt="R", group=1, solution="gold")]
    result = build_teacher_contexts(rows, settings, earlier=earlier)
    # of a, b, c the latest two are kept, and the first of these is shown
    assert [(c.source, c.demonstration, c.demonstration_text) for c in result] == [
        ("earlier", None, "b"),
        ("column", None, "gold"),
    ]
    again = EarlierSuccesses(2)
    again.load_state_dict(earlier.state_dict())
    assert again.by_prompt == earlier.by_prompt and again.of("Q")


def test_nothing_is_kept_without_a_buffer():
    earlier = EarlierSuccesses(0)
    earlier.add([row(1)], SETTINGS)
    assert earlier.by_prompt == {}


def test_a_question_for_the_teacher_makes_a_row_informative():
    rows = [row(0, question="Q, and the answer is 4"), row(0)]
    result = build_teacher_contexts(rows, SETTINGS)
    assert [c.is_informative for c in result] == [True, False]
    assert teacher_prompt("Q", result[0], SETTINGS) == "Q, and the answer is 4", "nothing fills the templates"


def test_a_question_for_the_teacher_is_what_the_template_wraps():
    context = TeacherContext(demonstration_text="4", source="column", question="Q (hint)")
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    expected = [messages[0], {"role": "user", "content": "Q (hint)\nSolution: 4\nSolve it."}]
    assert teacher_prompt(messages, context, SETTINGS) == expected
    assert messages[1]["content"] == "Q"


def test_messages_for_the_teacher_take_the_place_of_the_last_user_turn():
    prompt = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "<"},
    ]
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "T"}]
    assert with_question(prompt, turns) == [prompt[0], *turns, prompt[2]]
    with pytest.raises(ValueError, match="no user turn"):
        with_question(prompt, turns[:1])
    with pytest.raises(
        ValueError, match=r"teacher_prompt must be a string where the prompt is one, got \[\{'role': 'sys"
    ):
        with_question("Q", turns)


def test_a_question_for_the_teacher_is_kept_before_texts_and_given_up_where_it_does_not_fit():
    context = TeacherContext(demonstration_text="4" * 50, source="column", question="QQQQ")
    fitted = fit_teacher_prompt("Q", context, replace(SETTINGS, max_reprompt_len=10), count_tokens=words)
    assert fitted == ("QQQQ", TeacherContext(question="QQQQ"), True)
    given_up = fit_teacher_prompt("Q", context, replace(SETTINGS, max_reprompt_len=3), count_tokens=words)
    assert given_up == ("Q", TeacherContext(), True)


def test_a_blank_success_is_passed_over():
    rows = [row(1, text=" \n"), row(1, text="4"), row(0)]
    assert [c.demonstration for c in build_teacher_contexts(rows, SETTINGS)] == [1, None, 1]


# --- the prompt ------------------------------------------------------------------------------------------------------

BOTH = TeacherContext(demonstration=1, demonstration_text="S", feedback="F")


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (BOTH, "Q\nSolution: S\nFeedback: F\nSolve it."),
        (TeacherContext(feedback="F"), "Q\nFeedback: F\nSolve it."),
        (TeacherContext(demonstration=0, demonstration_text="S"), "Q\nSolution: S\nSolve it."),
        (TeacherContext(), "Q"),
    ],
)
def test_only_what_there_is_appears_in_a_string_prompt(context, expected):
    assert teacher_prompt("Q", context, SETTINGS) == expected


def test_system_and_earlier_turns_stay():
    head = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q0"},
        {"role": "assistant", "content": "A0"},
    ]
    result = teacher_prompt([*head, {"role": "user", "content": "Q"}], BOTH, SETTINGS)
    assert result == [*head, {"role": "user", "content": "Q\nSolution: S\nFeedback: F\nSolve it."}]


@pytest.mark.parametrize(
    "last", [[{"role": "assistant", "content": "The"}], [{"role": "assistant", "content": ""}, {"role": "tool"}]]
)
def test_turns_after_the_last_user_turn_stay(last):
    prompt = [{"role": "user", "content": "Q0"}, {"role": "user", "content": "Q", "name": "me"}, *last]
    result = teacher_prompt(prompt, TeacherContext(feedback="F"), SETTINGS)
    assert result == [prompt[0], {"role": "user", "content": "Q\nFeedback: F\nSolve it.", "name": "me"}, *last]


def test_parts_stay_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    settings = replace(SETTINGS, reprompt_template="Given{solution}: {prompt}{feedback}!")
    [turn] = teacher_prompt([{"role": "user", "content": parts}], BOTH, settings)
    before, after = {"type": "text", "text": "Given\nSolution: S: "}, {"type": "text", "text": "\nFeedback: F!"}
    assert turn["content"] == [before, *parts, after]
    assert content_text(turn["content"]) == "Given\nSolution: S: ab\nFeedback: F!"


def test_a_template_that_begins_with_the_question_adds_no_empty_part():
    parts = [{"type": "text", "text": "a"}]
    [turn] = teacher_prompt([{"role": "user", "content": parts}], TeacherContext(feedback="F"), SETTINGS)
    assert turn["content"] == [*parts, {"type": "text", "text": "\nFeedback: F\nSolve it."}]


def test_braces_in_values_pass_and_doubled_braces_in_a_template_are_literal():
    context = TeacherContext(1, "\\boxed{4} {prompt}", "{feedback_raw} {0} {")
    settings = replace(SETTINGS, reprompt_template="{prompt}{solution}{feedback} In \\boxed{{}}.")
    result = teacher_prompt("f(x) = {x} {solution}", context, settings)
    assert result == (
        "f(x) = {x} {solution}\nSolution: \\boxed{4} {prompt}\nFeedback: {feedback_raw} {0} { In \\boxed{}."
    )


@pytest.mark.parametrize("template", ["{prompt} {prompt}{solution}", "{solution}{feedback}"])
@pytest.mark.parametrize("prompt", ["Q", [{"role": "user", "content": [{"type": "text", "text": "Q"}]}]])
def test_the_question_appears_exactly_once(template, prompt):
    with pytest.raises(ValueError, match=r"\{prompt\} exactly once"):
        teacher_prompt(prompt, BOTH, replace(SETTINGS, reprompt_template=template))


@pytest.mark.parametrize(
    ("field", "template"),
    [
        ("reprompt_template", "{prompt}\\boxed{}"),
        ("solution_template", "{solution}"),
        ("feedback_template", "{raw!r}"),
    ],
)
def test_an_unknown_placeholder_is_named(field, template):
    with pytest.raises(ValueError, match=f"`{field}` holds .* which is no placeholder"):
        teacher_prompt("Q", BOTH, replace(SETTINGS, **{field: template}))


@pytest.mark.parametrize("context", [BOTH, TeacherContext()])
def test_the_prompt_is_never_changed_and_shares_nothing_with_the_result(context):
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "Q"}]}]
    before = copy.deepcopy(prompt)
    result = teacher_prompt(prompt, context, SETTINGS)
    for message in result:
        message["role"] = "changed"
    result[1]["content"][0]["text"] = "changed"
    assert prompt == before


def test_messages_without_a_user_turn_are_refused():
    with pytest.raises(ValueError, match="no user turn"):
        teacher_prompt([{"role": "system", "content": "s"}], BOTH, SETTINGS)


# --- length ----------------------------------------------------------------------------------------------------------


def fit(context, limit, prompt="Q", calls=None):
    def count(candidate):
        if calls is not None:
            calls.append(candidate)
        return words(candidate)

    return fit_teacher_prompt(prompt, context, replace(SETTINGS, max_reprompt_len=limit), count_tokens=count)


def test_what_fits_exactly_is_left_alone_and_counted_once():
    full = teacher_prompt("Q", BOTH, SETTINGS)
    calls = []
    assert fit(BOTH, words(full), calls=calls) == (full, BOTH, False)
    assert len(calls) == 1


def test_a_row_without_context_is_not_even_counted():
    calls = []
    assert fit(TeacherContext(), 0, calls=calls) == ("Q", TeacherContext(), False)
    assert calls == []


def test_the_middle_goes_and_as_many_characters_stay_as_fit():
    context = TeacherContext(demonstration=2, demonstration_text="0123456789" * 10)
    # "Q" + "\nSolution: " + text + "\nSolve it." is 1 + 11 + n + 10; the marker takes 7, so 60 leaves 31 characters
    prompt, shown, is_shortened = fit(context, 60)
    assert shown.demonstration_text == "0123456789012345" + CUT_MARKER + "567890123456789"
    assert (words(prompt), shown.demonstration, is_shortened) == (60, 2, True)
    assert prompt == f"Q\nSolution: {shown.demonstration_text}\nSolve it."


def test_both_texts_are_shortened_in_proportion():
    context = TeacherContext(0, "s" * 200, "f" * 100)
    prompt, shown, _ = fit(context, 150)
    kept_demonstration, kept_feedback = shown.demonstration_text.count("s"), shown.feedback.count("f")
    assert abs(kept_demonstration - 2 * kept_feedback) <= 2
    assert words(prompt) == 150


def test_question_system_turn_and_prefill_are_kept_whole():
    messages = [
        {"role": "system", "content": "system " * 5},
        {"role": "user", "content": "question " * 5},
        {"role": "assistant", "content": "prefill"},
    ]
    prompt, _, is_shortened = fit(TeacherContext(feedback="f" * 1000), 200, prompt=messages)
    assert is_shortened
    assert (prompt[0], prompt[2]) == (messages[0], messages[2])
    assert prompt[1]["content"].startswith("question " * 5 + "\nFeedback: f")
    assert words(prompt) == 200


def test_where_nothing_fits_the_row_keeps_its_own_prompt():
    question = "Q" * 50
    assert fit(BOTH, 40, prompt=question) == (question, TeacherContext(), True)


def test_a_demonstration_of_which_nothing_is_left_is_no_demonstration():
    context = TeacherContext(3, "s", "f" * 1000)
    _, shown, _ = fit(context, 60)
    assert (shown.demonstration, shown.demonstration_text) == (None, "")
    assert shown.is_informative


def test_a_long_text_takes_few_counts():
    calls = []
    fit(TeacherContext(feedback="f" * 100_000), 5000, calls=calls)
    assert len(calls) <= 1 + 17  # 2**17 > 100,000


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_context_metrics_count_groups_and_rows():
    rows = [
        *(row(1), row(0, feedback="x"), row(0, feedback=" ")),
        *(row(1, group=1), row(1, group=1), row(0, group=1)),
        *(row(0, group=2), row(None, group=2, feedback="y"), row(0, group=2)),
    ]
    metrics = context_metrics(rows, build_teacher_contexts(rows, SETTINGS), SETTINGS)
    assert metrics == {
        "self_distillation/success_group_fraction": (2, 3),
        "self_distillation/lone_success_fraction": (1, 3),
        "self_distillation/success_sample_fraction": (5, 9),
        "self_distillation/earlier_success_fraction": (0, 9),
        "self_distillation/solution_column_fraction": (0, 9),
        "self_distillation/feedback_available_fraction": (2, 9),
        "self_distillation/feedback_used_fraction": (2, 9),
        "self_distillation/reprompt_sample_fraction": (6, 9),
    }


def test_context_metrics_of_no_rows_are_zero_over_zero():
    assert set(context_metrics([], [], SETTINGS).values()) == {(0, 0)}
