"""What the teacher is shown: a sibling's success, the feedback about an attempt, and the prompt made of them.

Pure Python over whole groups. A prompt comes in and goes out as the dataset has it, a string or messages; what becomes
of it in the chat template is decided in `tokenization`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sdpo.templates import around_question, fill_template
from sdpo.types import Message, Prompt, RepromptSettings, ScoredRollout, TeacherContext

CUT_MARKER = "\n[...]\n"
"""Stands where the middle of a demonstration or of a feedback text was cut out."""

_CLOSED_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


# --- which context each row gets -------------------------------------------------------------------------------------


def build_teacher_contexts(rows: Sequence[ScoredRollout], settings: RepromptSettings) -> list[TeacherContext]:
    """One context per row, in the rows' order; `demonstration` counts in `rows`.

    A row is a success where its reward reaches `success_reward_threshold`; a row without a reward never is. Its
    demonstration is the first success of its group, itself left out with `dont_reprompt_on_self_success`. Feedback is
    given to rows that are no success. `rows` must hold whole groups, in any order.
    """
    demonstrations: dict[int, list[tuple[int, str]]] = {}
    if settings.use_successful_as_teacher:
        for index, row in enumerate(rows):
            text = _demonstration_text(row, settings) if is_success(row, settings) else ""
            if text:
                demonstrations.setdefault(row.rollout.group, []).append((index, text))
    return [_context(i, row, demonstrations.get(row.rollout.group, []), settings) for i, row in enumerate(rows)]


def is_success(row: ScoredRollout, settings: RepromptSettings) -> bool:
    """Whether the weighted reward reaches the threshold; False without a reward."""
    return row.reward is not None and row.reward >= settings.success_reward_threshold


def remove_thinking(text: str) -> str:
    """The text outside of thinking blocks, stripped.

    A block that the chat template opened has only its end in the text: all before it goes. A block that was never
    closed goes from its start on.
    """
    text = _CLOSED_THINKING.sub("", text)
    text = text.rpartition("</think>")[2]
    return text.partition("<think>")[0].strip()


def _demonstration_text(row: ScoredRollout, settings: RepromptSettings) -> str:
    """What of a successful completion is shown; empty where nothing but blanks is left."""
    text = row.rollout.text
    if settings.remove_thinking_from_demonstration:
        text = remove_thinking(text)
    return text if text.strip() else ""


def _context(
    index: int, row: ScoredRollout, demonstrations: Sequence[tuple[int, str]], settings: RepromptSettings
) -> TeacherContext:
    """Context of one row, given (index, text) of the demonstrations its group offers."""
    others = (d for d in demonstrations if d[0] != index or not settings.dont_reprompt_on_self_success)
    demonstration, text = next(others, (None, ""))
    is_told = (
        settings.include_environment_feedback
        and not is_success(row, settings)  # a success must not be told that it failed, whatever the source says
        and not (settings.environment_feedback_only_without_solution and demonstration is not None)
    )
    feedback = row.feedback if is_told and _has_feedback(row) else None
    return TeacherContext(demonstration=demonstration, demonstration_text=text, feedback=feedback or "")


def _has_feedback(row: ScoredRollout) -> bool:
    return row.feedback is not None and bool(row.feedback.strip())


# --- the prompt ------------------------------------------------------------------------------------------------------


def teacher_prompt(prompt: Prompt, context: TeacherContext, settings: RepromptSettings) -> Prompt:
    """The prompt the teacher answers: a copy of the student's, its question wrapped in `reprompt_template`.

    Of messages only the last user turn changes; turns before it and after it stay. Content that is a list of parts
    stays one: the template's text before and after the question becomes a part each. Without any context the copy is
    the student's prompt itself.

    Raises:
        ValueError: messages without a user turn, or a template that `parse_template` refuses.
    """
    if isinstance(prompt, str):
        if not context.is_informative:
            return prompt
        before, after = _around_question(context, settings)
        return before + prompt + after
    messages: list[Message] = copy_containers(prompt)
    if context.is_informative:
        before, after = _around_question(context, settings)
        turn = messages[_last_user_turn(messages)]
        turn["content"] = _wrap(turn["content"], before, after)
    return messages


def copy_containers(value: Any) -> Any:
    """A copy that shares no dict and no list with the original; what they hold is shared."""
    if isinstance(value, Mapping):
        return {key: copy_containers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_containers(item) for item in value]
    return value


def content_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a message: its content, or that of its text parts joined without anything between them.

    Raises:
        ValueError: a part that is not text.
    """
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") != "text":
            raise ValueError(
                f"a content part of type {part.get('type')!r} was given; only text parts are supported, "
                "not images or other inputs"
            )
    return "".join(part["text"] for part in content)


def _last_user_turn(messages: Sequence[Message]) -> int:
    for index in reversed(range(len(messages))):
        if messages[index]["role"] == "user":
            return index
    raise ValueError(f"the prompt has no user turn to show the context in; its roles: {[m['role'] for m in messages]}")


def _wrap(content: Any, before: str, after: str) -> Any:
    """Content of the same kind with text before and after it."""
    if isinstance(content, str):
        return before + content + after
    prefix = [{"type": "text", "text": before}] if before else []
    suffix = [{"type": "text", "text": after}] if after else []
    return [*prefix, *content, *suffix]


def _around_question(context: TeacherContext, settings: RepromptSettings) -> tuple[str, str]:
    """Text before and after the question in the filled `reprompt_template`."""
    solution = feedback = ""
    if context.demonstration_text:
        values = {"successful_previous_attempt": context.demonstration_text}
        solution = fill_template("solution_template", settings.solution_template, values)
    if context.feedback:
        feedback = fill_template("feedback_template", settings.feedback_template, {"feedback_raw": context.feedback})
    return around_question(settings.reprompt_template, {"solution": solution, "feedback": feedback})


# --- its length ------------------------------------------------------------------------------------------------------


def fit_teacher_prompt(
    prompt: Prompt,
    context: TeacherContext,
    settings: RepromptSettings,
    *,
    count_tokens: Callable[[Prompt], int],
) -> tuple[Prompt, TeacherContext, bool]:
    """Teacher's prompt of at most `max_reprompt_len` tokens, the context it shows, and whether that was shortened.

    Only the demonstration and the feedback give way, in proportion, each from its middle: the most characters that
    fit are kept. Where none fits, the row is left with its own prompt, whatever its length, and without context.
    `count_tokens` is called once where everything fits, and not at all for a row without context.
    """
    full = teacher_prompt(prompt, context, settings)
    if not context.is_informative or count_tokens(full) <= settings.max_reprompt_len:
        return full, context, False
    best = teacher_prompt(prompt, TeacherContext(), settings), TeacherContext(), True
    low, high = 0, len(context.demonstration_text) + len(context.feedback) - 1
    while low < high:
        kept = (low + high + 1) // 2
        shorter = _shorten(context, kept)
        candidate = teacher_prompt(prompt, shorter, settings)
        if count_tokens(candidate) <= settings.max_reprompt_len:
            low, best = kept, (candidate, shorter, True)
        else:
            high = kept - 1
    return best


def _shorten(context: TeacherContext, kept: int) -> TeacherContext:
    """The context with `kept` characters in all, shared in proportion to what its two texts had."""
    num_demonstration = len(context.demonstration_text)
    num_kept = round(kept * num_demonstration / (num_demonstration + len(context.feedback)))
    demonstration_text = _cut_middle(context.demonstration_text, num_kept)
    return TeacherContext(
        demonstration=context.demonstration if demonstration_text else None,
        demonstration_text=demonstration_text,
        feedback=_cut_middle(context.feedback, kept - num_kept),
    )


def _cut_middle(text: str, kept: int) -> str:
    """Beginning and end of a text, `kept` characters of it, joined by a marker; empty where none is kept."""
    if kept >= len(text):
        return text
    if kept <= 0:
        return ""
    num_end = kept // 2
    return text[: kept - num_end] + CUT_MARKER + text[len(text) - num_end :]


# --- what to log -----------------------------------------------------------------------------------------------------


def context_metrics(
    rows: Sequence[ScoredRollout], contexts: Sequence[TeacherContext], settings: RepromptSettings
) -> dict[str, tuple[float, float]]:
    """(numerator, denominator) by metric name: groups over groups, rows over rows.

    success_group_fraction: groups with a success. lone_success_fraction: groups with exactly one.
    success_sample_fraction: rows shown a demonstration. feedback_available_fraction: rows that have feedback text.
    feedback_used_fraction: rows shown it. reprompt_sample_fraction: rows shown either.
    """
    successes: dict[int, int] = {}
    for row in rows:
        group = row.rollout.group
        successes[group] = successes.get(group, 0) + is_success(row, settings)
    of_groups = {
        "success_group_fraction": sum(count > 0 for count in successes.values()),
        "lone_success_fraction": sum(count == 1 for count in successes.values()),
    }
    of_rows = {
        "success_sample_fraction": sum(context.demonstration is not None for context in contexts),
        "feedback_available_fraction": sum(_has_feedback(row) for row in rows),
        "feedback_used_fraction": sum(bool(context.feedback) for context in contexts),
        "reprompt_sample_fraction": sum(context.is_informative for context in contexts),
    }
    return {
        f"self_distillation/{name}": (float(count), float(total))
        for counts, total in ((of_groups, len(successes)), (of_rows, len(rows)))
        for name, count in counts.items()
    }
