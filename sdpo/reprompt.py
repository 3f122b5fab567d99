"""What the teacher is shown: a sibling's success, the feedback about an attempt, and the prompt made of them.

Pure Python over whole groups. A prompt comes in and goes out as the dataset has it, a string or messages; what becomes
of it in the chat template is decided in `tokenization`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sdpo.demonstrations import Demonstration, EarlierSuccesses, by_group, choose, is_success, shown_text
from sdpo.templates import around_question, fill_template
from sdpo.types import DemonstrationSource, Message, Prompt, RepromptSettings, ScoredRollout, TeacherContext

CUT_MARKER = "\n[...]\n"
"""Stands where the middle of a demonstration or of a feedback text was cut out."""


# --- which context each row gets -------------------------------------------------------------------------------------


def build_teacher_contexts(
    rows: Sequence[ScoredRollout],
    settings: RepromptSettings,
    *,
    earlier: EarlierSuccesses | None = None,
    seed: int = 0,
) -> list[TeacherContext]:
    """One context per row, in the rows' order; `demonstration` counts in `rows`.

    A row is a success where its reward reaches `success_reward_threshold`; a row without a reward never is. Its
    demonstration is a success of its group, itself left out with `dont_reprompt_on_self_success`; where there is none,
    an earlier success of the same prompt; else the solution of the dataset. `demonstration_selection` says which of
    several; `seed` and the row's index decide what "random" means. Feedback is given to rows that are no success.
    `rows` must hold whole groups, in any order.
    """
    siblings = by_group(rows, settings) if settings.use_successful_as_teacher else {}
    contexts = []
    for index, row in enumerate(rows):
        others = [
            demonstration
            for demonstration in siblings.get(row.rollout.group, [])
            if demonstration.row != index or not settings.dont_reprompt_on_self_success
        ]
        shown = choose(others, settings, seed=(seed, index))
        source: DemonstrationSource = "sibling"
        if shown is None and earlier is not None:
            shown, source = choose(earlier.of(row.rollout.prompt), settings, seed=(seed, index)), "earlier"
        given = row.solution if settings.demonstration_column is not None else None
        if shown is None and (text := shown_text(given or "", settings)):
            shown, source = Demonstration(text, reward=0.0, num_tokens=0, row=None), "column"
        contexts.append(_context(row, shown, source, settings))
    return contexts


def _context(
    row: ScoredRollout, shown: Demonstration | None, source: DemonstrationSource, settings: RepromptSettings
) -> TeacherContext:
    """Context of one row that is shown this demonstration."""
    is_told = (
        settings.include_environment_feedback
        and not is_success(row, settings)  # a success must not be told that it failed, whatever the source says
        and not (settings.environment_feedback_only_without_solution and shown is not None)
    )
    feedback = row.feedback if is_told and _has_feedback(row) else None
    return TeacherContext(
        demonstration=shown.row if shown else None,
        demonstration_text=shown.text if shown else "",
        feedback=feedback or "",
        source=source if shown else None,
        question=row.question,
    )


def _has_feedback(row: ScoredRollout) -> bool:
    return row.feedback is not None and bool(row.feedback.strip())


# --- the prompt ------------------------------------------------------------------------------------------------------


def teacher_prompt(prompt: Prompt, context: TeacherContext, settings: RepromptSettings) -> Prompt:
    """The prompt the teacher answers: a copy of the student's, its question wrapped in `reprompt_template`.

    Of messages only the last user turn changes; turns before it and after it stay. Content that is a list of parts
    stays one: the template's text before and after the question becomes a part each. Where the context has a question
    of its own, that is what is wrapped. Without demonstration and feedback nothing is.

    Raises:
        ValueError: messages without a user turn, a question that does not fit the prompt, or a template that
            `parse_template` refuses.
    """
    if context.question is not None:
        prompt = with_question(prompt, context.question)
    if isinstance(prompt, str):
        if not context.has_texts:
            return prompt
        before, after = _around_question(context, settings)
        return before + prompt + after
    messages: list[Message] = copy_containers(prompt)
    if context.has_texts:
        before, after = _around_question(context, settings)
        turn = messages[_last_user_turn(messages)]
        turn["content"] = _wrap(turn["content"], before, after)
    return messages


def with_question(prompt: Prompt, question: Prompt) -> Prompt:
    """The prompt with another question: in place of its last user turn, or of all of it where it is a string.

    A string takes the place of the turn's content, messages that of the turn.

    Raises:
        ValueError: messages for a prompt that is a string, messages without a user turn, or a prompt without one.
    """
    if isinstance(prompt, str):
        if not isinstance(question, str):
            raise ValueError(f"teacher_prompt must be a string where the prompt is one, got {question!r}")
        return question
    messages: list[Message] = copy_containers(prompt)
    at = _last_user_turn(messages)
    turns = [{**messages[at], "content": question}] if isinstance(question, str) else copy_containers(question)
    _last_user_turn(turns)
    return [*messages[:at], *turns, *messages[at + 1 :]]


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
    roles = [message["role"] for message in messages]
    raise ValueError(f"the teacher's prompt has no user turn to show the context in; its roles: {roles}")


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
    fit are kept. Where none fits, the teacher's own question is left, and where that does not fit, or there is none,
    the row's own prompt, whatever its length, without context.
    `count_tokens` is called once where everything fits, and not at all for a row without context.
    """
    full = teacher_prompt(prompt, context, settings)
    if not context.is_informative or count_tokens(full) <= settings.max_reprompt_len:
        return full, context, False
    bare = TeacherContext(question=context.question)
    best = teacher_prompt(prompt, bare, settings), bare, True
    if context.question is not None and count_tokens(best[0]) > settings.max_reprompt_len:
        return teacher_prompt(prompt, TeacherContext(), settings), TeacherContext(), True
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
        source=context.source if demonstration_text else None,
        question=context.question,
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
    success_sample_fraction: rows shown a success, of a sibling or an earlier one. earlier_success_fraction: of these
    the earlier ones. solution_column_fraction: rows shown the
    dataset's solution. feedback_available_fraction: rows that have feedback text. feedback_used_fraction: rows shown
    it. reprompt_sample_fraction: rows whose teacher is shown anything.
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
        "success_sample_fraction": sum(context.source in ("sibling", "earlier") for context in contexts),
        "earlier_success_fraction": sum(context.source == "earlier" for context in contexts),
        "solution_column_fraction": sum(context.source == "column" for context in contexts),
        "feedback_available_fraction": sum(_has_feedback(row) for row in rows),
        "feedback_used_fraction": sum(bool(context.feedback) for context in contexts),
        "reprompt_sample_fraction": sum(context.is_informative for context in contexts),
    }
    return {
        f"self_distillation/{name}": (float(count), float(total))
        for counts, total in ((of_groups, len(successes)), (of_rows, len(rows)))
        for name, count in counts.items()
    }
