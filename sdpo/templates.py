"""The three templates of the teacher's prompt: what they may hold, and how they are filled.

Read at construction of the config and again when a prompt is made, by one parser, so that what passes there is filled
here. Values are never parsed: braces in them stay as they are.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from string import Formatter

# Template -> the names it may hold, the required one first.
PLACEHOLDERS: Mapping[str, tuple[str, ...]] = {
    "reprompt_template": ("prompt", "solution", "feedback"),
    "solution_template": ("successful_previous_attempt",),
    "feedback_template": ("feedback_raw",),
}
# The question is a message of its own kind, text or parts, so the template is what stands before it and after it.
_EXACTLY_ONCE = "prompt"


@cache
def parse_template(name: str, template: str) -> tuple[tuple[str, str | None], ...]:
    """(literal text, placeholder behind it) in order; None where none follows.

    Raises:
        ValueError: a brace that is none of the placeholders of this template, a required placeholder that is missing,
            or `{prompt}` more than once.
    """
    allowed = PLACEHOLDERS[name]
    names = ", ".join(f"{{{a}}}" for a in allowed)
    help_text = f"Allowed are {names}; write a literal brace twice, as in \\boxed{{{{}}}}."
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"`{name}` holds an unmatched brace ({error}): {template!r}. {help_text}") from None
    for literal, key, spec, conversion in parsed:
        if key is not None and (key not in allowed or spec or conversion):
            before = literal[-12:].split()[-1:] if not literal[-1:].isspace() else []
            format_ = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            piece = "".join(before) + "{" + key + format_ + "}"
            raise ValueError(
                f"`{name}` holds {piece!r}, which is no placeholder.{did_you_mean(key, allowed)} {help_text}"
            )
    pieces = tuple((literal, key) for literal, key, _, _ in parsed)
    required = allowed[0]
    count = [key for _, key in pieces].count(required)
    if required == _EXACTLY_ONCE and count != 1:
        raise ValueError(f"`{name}` must contain {{{required}}} exactly once, found {count} times in {template!r}.")
    if not count:
        raise ValueError(f"`{name}` must contain {{{required}}}, got {template!r}.")
    return pieces


def fill_template(name: str, template: str, values: Mapping[str, str]) -> str:
    """The text of a template with a value for each of its placeholders."""
    return _fill(parse_template(name, template), values)


def around_question(template: str, values: Mapping[str, str]) -> tuple[str, str]:
    """Text before and after the question in a filled `reprompt_template`; `values` for all but `{prompt}`."""
    pieces = parse_template("reprompt_template", template)
    at = [key for _, key in pieces].index(_EXACTLY_ONCE)
    return _fill(pieces[:at], values) + pieces[at][0], _fill(pieces[at + 1 :], values)


def _fill(pieces: Iterable[tuple[str, str | None]], values: Mapping[str, str]) -> str:
    return "".join(literal + (values[key] if key is not None else "") for literal, key in pieces)


def did_you_mean(value: object, options: Iterable[str]) -> str:
    """A sentence with the option closest to `value`; empty where none is close."""
    close = difflib.get_close_matches(str(value), list(options), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
