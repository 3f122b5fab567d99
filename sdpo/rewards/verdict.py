"""Whether an answer is the expected one: data from an untrusted program, judged in the process of the trainer."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_EXACT = re.compile(r"[+-]?[0-9]+")


class NoValue(Exception):
    """What came back is no JSON value."""


def parse(output: bytes) -> Any:
    """The value in `output`.

    Raises:
        NoValue: there is none, or more than one.
    """
    try:
        return json.loads(output)
    except (ValueError, RecursionError) as error:  # ValueError also of bytes that are no text, and of huge integers
        raise NoValue(str(error)) from error


def same_value(answer: Any, expected: Any, *, tolerance: float) -> bool:
    """Equality of two JSON values: types must match, but for a whole number where a fraction is expected or given.

    Fractions may differ by `tolerance`, relative or absolute.
    """
    numbers = {type(answer), type(expected)}
    if numbers == {float} or numbers == {int, float}:
        return _is_close(answer, expected, tolerance)
    if type(answer) is not type(expected):
        return False
    if isinstance(expected, list):
        pairs = zip(answer, expected, strict=False)
        return len(answer) == len(expected) and all(same_value(a, e, tolerance=tolerance) for a, e in pairs)
    if isinstance(expected, dict):
        return answer.keys() == expected.keys() and all(
            same_value(answer[key], expected[key], tolerance=tolerance) for key in expected
        )
    return bool(answer == expected)


def same_text(answer: str, expected: str, *, tolerance: float) -> bool:
    """Equality line by line, without spaces at the ends of lines and empty lines at the end.

    Lines that differ may still be equal word by word, where a fraction in the expected one allows `tolerance`.
    """
    answers, expecteds = _lines(answer), _lines(expected)
    return len(answers) == len(expecteds) and all(
        a == e or _same_words(a.split(), e.split(), tolerance) for a, e in zip(answers, expecteds, strict=True)
    )


def _same_words(answers: list[str], expecteds: list[str], tolerance: float) -> bool:
    if len(answers) != len(expecteds):
        return False
    for answer, expected in zip(answers, expecteds, strict=True):
        are_numbers = _NUMBER.fullmatch(answer) and _NUMBER.fullmatch(expected)
        is_fraction = are_numbers and not _EXACT.fullmatch(expected)
        if answer != expected and not (is_fraction and _is_close(float(answer), float(expected), tolerance)):
            return False
    return True


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _is_close(answer: float, expected: float, tolerance: float) -> bool:
    try:
        return math.isclose(answer, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond every float
        return False
