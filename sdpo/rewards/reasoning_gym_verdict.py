"""The score of an answer by its task in reasoning-gym. Runs in the forks of `fork_server`.

Some tasks hand the answer to `eval`, so that what runs here can be any program that a model writes.
"""

from __future__ import annotations

from typing import Any


def warm_up() -> None:
    import reasoning_gym  # noqa: F401, so that forks have it


def judge(item: dict[str, Any]) -> float:
    """Score of `answer`; `row` is what `reasoning_gym_dataset` wrote."""
    import reasoning_gym

    row = decode(item["row"])
    task = reasoning_gym.create_dataset(row["task"], **row["config"])
    return float(task.score_answer(item["answer"], row["entry"]))


def encode(value: Any) -> Any:
    """A value that JSON can hold and that `decode` turns back: tuples and dicts with keys of any kind are marked."""
    if isinstance(value, tuple):
        return {"__tuple__": [encode(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {"__dict__": [[encode(key), encode(item)] for key, item in value.items()]}
    return [encode(item) for item in value] if isinstance(value, list) else value


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__tuple__"}:
        return tuple(decode(item) for item in value["__tuple__"])
    if value.keys() == {"__dict__"}:
        return {decode(key): decode(item) for key, item in value["__dict__"]}
    return {key: decode(item) for key, item in value.items()}
