"""Reward and feedback of questions with choices: the letter that an attempt decides for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdpo.rewards.attempts import CUT_OFF, answers_of, column, truncations
from sdpo.types import Score

LETTERS = "ABCDEFGHIJ"

_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_MARKUP = str.maketrans("", "", '*`$"_')
# A bare capital must be followed by what ends it, so that "A" and "I" are no words of a sentence.
_END = r"(?=[ \t]*(?:[.,;:!)\]}/-]|$|(?:because|since|as|or|and|which|is)\b))"
_ITEM = rf"(?:[(\[][ \t]*[A-Za-z][ \t]*[)\]]|[A-Z](?![A-Za-z']){_END})"
_LIST = rf"{_ITEM}(?:[ \t]*(?:,|/|\bor\b|\band\b)+[ \t]*(?:or[ \t]+|and[ \t]+)?(?:option[ \t]+)?{_ITEM})*"
_STATEMENT = re.compile(
    rf"(?i:\b(?:answer|(?:correct|right|best)[ \t]+(?:choice|option))\b(?:[^.\n]{{0,40}}?(?:\bis\b|:|=))?[ \t]*"
    rf"(?:the[ \t]+)?(?:(?:choice|option|letter|answer)[ \t]+)?)(?<![A-Za-z])({_LIST})"
    rf"|(?<![A-Za-z])({_ITEM})[ \t]+is[ \t]+(?:the[ \t]+)?(?:correct|right|best)\b",
    re.MULTILINE,
)
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_LONE_LIST = re.compile(rf"{_LIST}\.?", re.MULTILINE)
_LONE_LETTER = re.compile(r"[A-Za-z]")
_LABELLED = re.compile(r"[(\[]?([A-Z])[)\].:][ \t]*(.+)")
_LETTER = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])")


@dataclass(frozen=True)
class MultipleChoiceReward:
    """Reward function: 1.0 where a completion decides for the right choice, else 0.0, and what is wrong with it.

    The column `answer_column` holds the right choice as a letter from A to J, as an index from 0, or as the text of
    one of the choices; None: the function does not apply. The column `choices_column`, which may be absent, holds the
    list of the choices' texts, or a dict with the list under "text". `show_answer`: the feedback names the right one.
    """

    answer_column: str = "answer"
    choices_column: str = "choices"
    show_answer: bool = False

    __name__ = "multiple_choice_reward"

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Any = None,
        *,
        is_truncated: Sequence[bool] | None = None,
        **columns: Any,
    ) -> list[Score]:
        """One Score per completion, in order.

        Raises:
            ValueError: no column of answers, or an answer that is none of the choices; the message names the row.
        """
        count = len(completions)
        answers = column(columns, self.answer_column, count, what="the right choices are")
        choices = [_texts(row) for row in columns.get(self.choices_column) or [None] * count]
        rights = [
            _right_letter(answer, texts, f"{self.answer_column} of row {i}")
            for i, (answer, texts) in enumerate(zip(answers, choices, strict=True))
        ]
        cut = truncations(is_truncated, count)
        return [self._score(*row) for row in zip(answers_of(completions), rights, choices, cut, strict=True)]

    def _score(self, text: str, right: str | None, choices: Sequence[str], is_cut: bool) -> Score:
        if right is None:
            return Score(None)
        chosen = chosen_letters(text, choices, is_cut=is_cut)
        if chosen == {right}:
            return Score(1.0)
        allowed = LETTERS[: len(choices)] or LETTERS
        unknown = sorted(chosen - set(allowed))
        if not chosen and is_cut:
            problem = f"{CUT_OFF} before it named a choice."
        elif not chosen:
            problem = f'No choice was found. End with "The answer is (X)", X being a letter from A to {allowed[-1]}.'
        elif len(chosen) > 1:
            problem = f"Several choices were named at the end: {', '.join(sorted(chosen))}. Decide for one."
        elif unknown:
            problem = f"There is no choice {unknown[0]}; the choices are A to {allowed[-1]}."
        else:
            problem = f"{chosen.pop()} is not the right choice."
        return Score(0.0, f"{problem} The right one is {right}." if self.show_answer else problem)


multiple_choice_reward = MultipleChoiceReward()
"""With every setting at its default."""


def chosen_letters(text: str, choices: Sequence[str] = (), *, is_cut: bool = False) -> set[str]:
    """Letters that an attempt decides for: those of the last line that has some.

    Looked for in this order: `\\boxed{B}`; a last line that is a letter, a letter with a text, or a choice's text; a
    statement ("The answer is (B)"). Where the attempt `is_cut`, its end may be half a word and is not read.
    """
    text = _WRAPPER.sub(r"\1", text).translate(_MARKUP).rstrip()
    boxes = _of_last_line(_BOXED, text)
    if boxes:
        return set().union(*(_of_line(box[1].strip(), choices) for box in boxes))
    lone = set() if is_cut else _of_line(text.rpartition("\n")[2].strip(), choices)
    statements = _of_last_line(_STATEMENT, text, end=len(text) - is_cut)
    return lone or set().union(*(_letters(statement[1] or statement[2]) for statement in statements))


def _of_last_line(pattern: re.Pattern[str], text: str, *, end: int | None = None) -> list[re.Match[str]]:
    """Matches that start in the line of the last one, of those that end at `end` or before it."""
    found = [match for match in pattern.finditer(text) if end is None or match.end() <= end]
    start = text.rfind("\n", 0, found[-1].start()) + 1 if found else 0
    return [match for match in found if match.start() >= start]


def _letters(text: str) -> set[str]:
    return {letter.upper() for letter in _LETTER.findall(text)}


def _of_line(line: str, choices: Sequence[str]) -> set[str]:
    """Letters of a line that is nothing but a choice or a list of choices."""
    if _LONE_LETTER.fullmatch(line) or _LONE_LIST.fullmatch(line):
        return _letters(line)
    by_text = {_plain(choice): letter for choice, letter in zip(choices, LETTERS, strict=False)}
    labelled = _LABELLED.fullmatch(line)
    if labelled is not None and (not choices or by_text.get(_plain(labelled[2])) == labelled[1]):
        return {labelled[1]}
    return {by_text[_plain(line)]} if _plain(line) in by_text else set()


# --- the data set ----------------------------------------------------------------------------------------------------


def _texts(row: Any) -> list[str]:
    """Texts of the choices; empty where the row has none."""
    if row is None:
        return []
    return [str(text) for text in (row["text"] if isinstance(row, Mapping) else row)]


def _right_letter(answer: Any, choices: Sequence[str], where: str) -> str | None:
    allowed = LETTERS[: len(choices)] if choices else LETTERS
    if len(choices) > len(LETTERS):
        raise ValueError(f"{where}: {len(choices)} choices; at most {len(LETTERS)} have a letter")
    if answer is None:
        return None
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(allowed):
        return allowed[answer]
    if isinstance(answer, str):
        letter = answer.strip().strip("().").upper()
        if len(letter) == 1 and letter in allowed:
            return letter
        texts = [_plain(choice) for choice in choices]
        if texts.count(_plain(answer)) == 1:
            return allowed[texts.index(_plain(answer))]
    raise ValueError(
        f"{where} is {answer!r}; give a letter from A to {allowed[-1]}, an index from 0 to {len(allowed) - 1}, or the "
        f"text of one of the choices{f' {list(choices)}' if choices else ''}"
    )


def _plain(text: str) -> str:
    """Text without what does not tell choices apart."""
    return " ".join(text.translate(_MARKUP).casefold().split()).rstrip(".")
