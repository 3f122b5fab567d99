"""What reward functions are given, read: the text of an attempt, and the column of the data set that judges it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from sdpo.demonstrations import remove_thinking
from sdpo.reprompt import content_text
from sdpo.types import Rollout

CUT_OFF = "The answer was cut off at the length limit"


def text_of(completion: Any) -> str:
    """Text of a completion: a string, or the last message of a chat."""
    return completion if isinstance(completion, str) else content_text(completion[-1].get("content") or "")


def answers_of(completions: Sequence[Any]) -> list[str]:
    """Text of each completion, stripped and without thinking."""
    return [remove_thinking(text_of(completion)) for completion in completions]


def column(columns: Mapping[str, Any], name: str, num_completions: int, *, what: str) -> Sequence[Any]:
    """The values of a column, one a completion. `what` is looked for in it, in words.

    Raises:
        ValueError: the data set has no such column, or it has not one value a completion.
    """
    if name not in columns:
        raise ValueError(f"the dataset has no column {name!r}, where {what} looked for; it has {_names(columns)}")
    values: Sequence[Any] = columns[name]
    if len(values) != num_completions:
        raise ValueError(f"{num_completions} completions but {len(values)} rows of {name!r}")
    return values


def truncation_argument(function: Callable[..., Any], rollouts: Sequence[Rollout]) -> dict[str, list[bool]]:
    """`is_truncated`, one value a rollout, for a function that has a parameter of this name; else nothing.

    Nothing either for compiled code that hides its parameters.
    """
    try:
        is_asked_for = "is_truncated" in inspect.signature(function).parameters
    except ValueError:
        return {}
    return {"is_truncated": [rollout.completion.is_truncated for rollout in rollouts]} if is_asked_for else {}


def truncations(is_truncated: Sequence[bool] | None, num_completions: int) -> Sequence[bool]:
    """Whether each attempt was cut at the length limit; False where the caller does not say."""
    return [False] * num_completions if is_truncated is None else is_truncated


def cut(text: str, budget: int) -> str:
    """At most `budget` characters: the two ends of the text."""
    if len(text) <= budget:
        return text
    mark = " [...] "
    half = (budget - len(mark)) // 2
    return text[:half] + mark + text[len(text) - half :]


def need_package(module: str, *, extra: str, user: str) -> None:
    """Nothing, where a package is installed; it is not imported.

    Raises:
        ImportError: it is not; the message says how to install it.
    """
    if find_spec(module) is None:
        raise ImportError(f"{user} needs the package {module}: pip install 'sdpo[{extra}]'")


def _names(columns: Mapping[str, Any]) -> list[str]:
    return sorted(set(columns) - {"trainer_state"})
