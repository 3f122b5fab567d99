"""Reward and feedback of mathematical answers: the final answer of an attempt against the one of its row."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

from sdpo.rewards.attempts import CUT_OFF, answers_of, column, cut, need_package, truncations
from sdpo.rewards.workers import Verdict, fork_level, judge_all
from sdpo.types import Score

Form = Literal["boxed", "####", "number"]

_TAIL = 1000  # characters at the end of an attempt in which a number is looked for
_SHOWN = 200
_BOX = re.compile(r"\\f?boxed\s*\{")
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_BRACE = re.compile(r"(?<!\\)[{}]")
_INTEGER = re.compile(r"\\boxed\{(-?\d{1,30})\}")
_HOW = {"boxed": "in \\boxed{}", "####": "after ####", "number": "as the last number"}


@dataclass(frozen=True)
class Answer:
    """The final answer of a text: as it stands there, and the text in which math-verify finds it. Or the `problem`."""

    shown: str = ""
    text: str = ""
    problem: str | None = None


@dataclass(frozen=True)
class MathReward:
    """Reward function: 1.0 where a completion's final answer equals that of its row, else 0.0, and what is wrong.

    The column `answer_column` holds the answer as a number, as LaTeX, or as a text with the answer in `\\\\boxed{}` or
    after `####`; None: the function does not apply. Where there is no such column, `solution` is read. `forms`: where
    a completion may have its final answer, the first that is found counts, and the last of its kind: "boxed", "####",
    "number" (the last number or formula of the text, as math-verify finds it).

    `seconds` of the processor's time for one comparison. `num_workers`: comparisons at once, None for one a core.
    `show_answer`: the feedback of a wrong answer gives the right one away.
    """

    answer_column: str = "answer"
    forms: Sequence[Form] = ("boxed", "####", "number")
    show_answer: bool = False
    seconds: int = 3
    num_workers: int | None = None

    __name__ = "math_reward"

    def __post_init__(self) -> None:
        unknown = [form for form in self.forms if form not in get_args(Form)]
        if unknown or not self.forms or isinstance(self.forms, str):
            raise ValueError(f"forms is {self.forms!r}; some of {list(get_args(Form))} are needed")
        if self.seconds < 1 or (self.num_workers is not None and self.num_workers < 1):
            raise ValueError(f"seconds ({self.seconds}) and num_workers ({self.num_workers}) must be at least 1")

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
            ValueError: no column of answers, or one without an answer; the message names the row.
            ImportError: math-verify is not installed.
        """
        need_package("math_verify", extra="math", user="math_reward")
        count = len(completions)
        name = "solution" if self.answer_column not in columns and "solution" in columns else self.answer_column
        golds = [
            _gold(value, f"{name} of row {i}")
            for i, value in enumerate(column(columns, name, count, what="the right answers are"))
        ]
        cuts = truncations(is_truncated, count)
        answers = [self._find(text, is_cut) for text, is_cut in zip(answers_of(completions), cuts, strict=True)]
        verdicts = self._judge(golds, answers)
        return [
            Score(None) if gold is None else self._score(answer, verdict, gold)
            for answer, verdict, gold in zip(answers, verdicts, golds, strict=True)
        ]

    def _judge(self, golds: Sequence[str | None], answers: Sequence[Answer]) -> list[Verdict | None]:
        """What is said of each answer; None where there is no answer or nothing to compare it with."""
        pairs = [
            None if gold is None or answer.problem is not None else (gold, answer.text)
            for gold, answer in zip(golds, answers, strict=True)
        ]
        verdicts = [None if pair is None else _of_integers(*pair) for pair in pairs]
        rows = [i for i, pair in enumerate(pairs) if pair is not None and verdicts[i] is None]
        judged = judge_all(
            "sdpo.rewards.math_verdict",
            [{"gold": golds[i], "answer": answers[i].text} for i in rows],
            seconds=self.seconds,
            level=fork_level() or "limited",
            num_workers=self.num_workers,
        )
        for i, verdict in zip(rows, judged, strict=True):
            verdicts[i] = verdict
        return verdicts

    def _find(self, text: str, is_cut: bool) -> Answer:
        """The final answer of an attempt, in the first of the forms that it has."""
        for form in self.forms:
            found = _in_box(text) if form == "boxed" else _after_hashes(text, is_cut) if form == "####" else None
            # What stands at the end of a text that was cut need not be the number that was meant.
            if form == "number" and re.search(r"\d|\$|\\\(|\\\[", text) and not is_cut:
                tail = text[-_TAIL:]
                found = Answer("", tail[tail.find("\n") + 1 :] if len(text) > _TAIL else tail)
            if found is not None:
                return found
        if is_cut:
            return Answer(problem=f"{CUT_OFF} before it came to a final answer.")
        return Answer(problem=self._missing)

    @property
    def _missing(self) -> str:
        return f"There is no final answer. Give it {' or '.join(_HOW[form] for form in self.forms)}."

    def _score(self, answer: Answer, verdict: Verdict | None, gold: str) -> Score:
        if verdict is None:
            return Score(0.0, answer.problem)
        found = answer.shown or (verdict.value or {}).get("found") or ""
        shown = f'"{cut(found, _SHOWN)}"' if found else "at the end of the text"
        if verdict.problem is not None:
            reason = f"took more than {self.seconds} s" if verdict.problem == "time" else "failed"
            return Score(0.0, f"The final answer {shown} is no simple value: to compare it {reason}.")
        if verdict.value["is_equal"]:
            return Score(1.0)
        read_as = verdict.value["read_as"]
        if not found:
            return Score(0.0, self._missing)
        if read_as is None:
            return Score(0.0, f"The final answer {shown} cannot be read as a number or formula.")
        is_plain = found.replace(" ", "") == read_as.replace(" ", "")
        named = read_as if is_plain else f"{shown}, which is read as {read_as},"
        problem = f"The final answer {named} is wrong."
        return Score(0.0, f"{problem} The right one is {_shown_gold(gold)}." if self.show_answer else problem)


math_reward = MathReward()
"""With every setting at its default."""


# --- texts -----------------------------------------------------------------------------------------------------------


def _in_box(text: str) -> Answer | None:
    """The content of the last box."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    box, depth = boxes[-1], 1
    for brace in _BRACE.finditer(text, box.end()):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            content = text[box.end() : brace.start()].strip()
            return _boxed(content) if content else Answer(problem="The final answer \\boxed{} is empty.")
    return Answer(problem=f"The box of the final answer is not closed: {cut(text[box.start() :], _SHOWN)}")


def _boxed(content: str) -> Answer:
    """A content that math-verify is to read as a whole, LaTeX or not."""
    return Answer(content, rf"\boxed{{{content}}}")


def _after_hashes(text: str, is_cut: bool) -> Answer | None:
    """What follows the last ####."""
    found = _HASHES.findall(text)
    if not found or (is_cut and text.endswith(found[-1])):
        return None
    content = found[-1].strip().removesuffix(".")
    return _boxed(content) if content else Answer(problem="There is nothing after ####.")


def _gold(value: Any, where: str) -> str | None:
    """The text in which math-verify finds the right answer.

    Raises:
        ValueError: there is none.
    """
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return rf"\boxed{{{format(Decimal(repr(value)), 'f')}}}"
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where} is {value!r}; a number or a text with the answer is needed")
    # The box first, since #### also begins a heading of Markdown.
    found = _in_box(value) or _after_hashes(value, False)
    if found is not None and found.problem is not None:
        raise ValueError(f"{where} has no answer: {found.problem}")
    if found is not None:
        return found.text
    return value if "$" in value else _boxed(value.strip()).text


def _of_integers(gold: str, answer: str) -> Verdict | None:
    """The verdict on two integers, which needs no process; None for all else."""
    numbers = [_INTEGER.fullmatch(text) for text in (gold, answer)]
    if numbers[0] is None or numbers[1] is None:
        return None
    right, given = int(numbers[0][1]), int(numbers[1][1])
    return Verdict({"is_equal": given == right, "found": str(given), "read_as": str(given)})


def _shown_gold(gold: str) -> str:
    return cut(gold.removeprefix("\\boxed{").removesuffix("}") if gold.startswith("\\boxed{") else gold, _SHOWN)
