"""Rewards and feedback of completions: reward functions are called, awaited, checked and weighed here."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sdpo.reprompt import copy_containers
from sdpo.rewards.attempts import truncation_argument
from sdpo.rewards.reward_model import RewardModel
from sdpo.types import Report, Rollout, Score, ScoredRollout

FEEDBACK_COLUMN, QUESTION_COLUMN = "privileged_context", "teacher_prompt"
_NOT_COLUMNS = {"prompt", "completion", "completion_ids"}
_RESERVED = ("prompts", "completions", "trainer_state")
_ALLOWED = "a number, None, Score(reward, feedback) or a dict with 'reward' or 'score' and 'feedback'"
MAX_REWARD = 1e30


class RewardScorer:
    """Calls the reward functions of a run on its completions.

    `reward_funcs`: one or a list of callables, also async, `f(prompts, completions, completion_ids, **columns,
    trainer_state)`, of sequence-classification models, or of ids or paths of such models; one with a parameter
    `is_truncated` is told which completions were cut. None or an empty list: no completion has a reward.
    `reward_weights`: one a function, None for 1.0 each. `reward_processing_classes`: one a function, None where it is
    loaded with the model; entries beside plain functions are not used. `demonstration_column`: the dataset's column of
    solutions, None for none.

    Raises:
        TypeError: a reward function that cannot be called.
        ValueError: as many weights or processing classes as functions are needed; a model with several labels.
    """

    def __init__(
        self,
        reward_funcs: Any,
        *,
        reward_weights: Sequence[float] | None,
        reward_processing_classes: Any = None,
        chat_template_kwargs: Mapping[str, Any],
        model_init_kwargs: Mapping[str, Any] | None,
        trust_remote_code: bool,
        device: torch.device | str,
        demonstration_column: str | None = None,
    ) -> None:
        given = _as_list(reward_funcs)
        self.demonstration_column = demonstration_column
        self.names = _unique([_name_of(function, index) for index, function in enumerate(given)])
        weights = [1.0] * len(given) if reward_weights is None else list(reward_weights)
        self._check_count("reward_weights", weights)
        processing_classes = _as_list(reward_processing_classes) or [None] * len(given)
        self._check_count("reward_processing_classes", processing_classes)
        self.weights = [float(weight) for weight in weights]
        self.functions: list[Callable[..., Any]] = []
        for function, processing_class in zip(given, processing_classes, strict=True):
            if isinstance(function, str | PreTrainedModel):
                function = RewardModel(
                    function,
                    processing_class,
                    chat_template_kwargs=chat_template_kwargs,
                    model_init_kwargs={"trust_remote_code": trust_remote_code, **(model_init_kwargs or {})},
                    device=device,
                )
            self.functions.append(function)
        # One loop for the whole run: clients that reward functions keep open belong to the loop they were used in.
        self._loop = asyncio.new_event_loop()
        weakref.finalize(self, self._loop.close)

    def score(
        self,
        rollouts: Sequence[Rollout],
        examples: Sequence[Mapping[str, Any]],
        *,
        trainer_state: Any,
        report: Report = lambda *_: None,
    ) -> list[ScoredRollout]:
        """One value per rollout; `examples` are the dataset's rows, one a rollout.

        Functions get copies, so that what they change stays with them. `report` is told the rewards there are and the
        functions that have finished, whenever one has.

        Raises:
            TypeError: a value or feedback of a kind that is not allowed.
            ValueError: not one value per completion; an infinite reward; a column with the name of an argument.
            RuntimeError: a reward function raised; from that error, with the function's name and the step.
        """
        if len(rollouts) != len(examples):
            raise ValueError(f"{len(rollouts)} rollouts but {len(examples)} examples; one a rollout is needed")
        columns = _columns(examples)
        numbers_done = count(1)

        def on_finished() -> None:
            num_finished = next(numbers_done)
            report(num_finished * len(rollouts), num_finished)

        returned = self._call_all(rollouts, columns, trainer_state, on_finished)
        by_function = [_scores(name, values, len(rollouts)) for name, values in zip(self.names, returned, strict=True)]
        fallback = [
            _format_feedback(example.get(FEEDBACK_COLUMN), f"{FEEDBACK_COLUMN} of row {i}", is_named=True)
            for i, example in enumerate(examples)
        ]
        return [
            self._scored(rollout, [scores[i] for scores in by_function], fallback[i], examples[i])
            for i, rollout in enumerate(rollouts)
        ]

    def _scored(
        self, rollout: Rollout, scores: Sequence[Score], fallback: str | None, example: Mapping[str, Any]
    ) -> ScoredRollout:
        """Weighted sum and joined feedback of one rollout, and what its example has for the teacher."""
        column = self.demonstration_column
        weighed = [w * s.reward for w, s in zip(self.weights, scores, strict=True) if s.reward is not None]
        texts = [score.feedback for score in scores if score.feedback is not None and score.feedback.strip()]
        return ScoredRollout(
            rollout=rollout,
            rewards={name: score.reward for name, score in zip(self.names, scores, strict=True)},
            reward=sum(weighed) if weighed else None,
            feedback="\n".join(texts) if texts else fallback,
            solution=None if column is None else _format_feedback(example.get(column), column, is_named=True),
            question=copy_containers(example.get(QUESTION_COLUMN) or None),
        )

    def _call_all(
        self,
        rollouts: Sequence[Rollout],
        columns: Mapping[str, list[Any]],
        trainer_state: Any,
        on_finished: Callable[[], None],
    ) -> list[Any]:
        """What each function returns: called in order, then what is to be awaited is awaited at once."""
        step = trainer_state.global_step
        returned: list[Any] = []
        try:
            for name, function in zip(self.names, self.functions, strict=True):
                arguments = {**copy_containers(columns), **_arguments(rollouts), "trainer_state": trainer_state}
                arguments = truncation_argument(function, rollouts) | arguments
                try:
                    returned.append(function(**arguments))
                except Exception as error:
                    raise _named(error, name, step) from error
                if not inspect.isawaitable(returned[-1]):
                    on_finished()
        except RuntimeError:
            for value in returned:
                if inspect.iscoroutine(value):
                    value.close()
            raise
        waiting = {i: value for i, value in enumerate(returned) if inspect.isawaitable(value)}
        if waiting:
            names = [self.names[i] for i in waiting]
            work = _gather(names, list(waiting.values()), step, on_finished)
            for i, value in zip(waiting, self._run(work), strict=True):
                returned[i] = value
        return returned

    def _run(self, work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """Result of a coroutine, from a thread of its own where this one already runs a loop, as in a notebook."""
        if not _is_in_event_loop():
            return self._loop.run_until_complete(work)
        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(self._loop.run_until_complete, work).result()

    def _check_count(self, field: str, values: Sequence[Any]) -> None:
        if len(values) != len(self.names):
            raise ValueError(
                f"{field} has {len(values)} entries for {len(self.names)} reward functions {self.names}; give one each"
            )


# --- calling ---------------------------------------------------------------------------------------------------------


def _columns(examples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Every dataset column that reward functions get, one value a row; None where a row lacks it."""
    names = [
        name for name in dict.fromkeys(key for example in examples for key in example) if name not in _NOT_COLUMNS
    ]
    taken = [name for name in names if name in _RESERVED]
    if taken:
        raise ValueError(f"the dataset columns {taken} have names of arguments of reward functions; rename them")
    return {name: [example.get(name) for example in examples] for name in names}


def _arguments(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """What every reward function gets besides columns, not shared with the rollouts."""
    return {
        "prompts": [copy_containers(rollout.prompt) for rollout in rollouts],
        "completions": [
            rollout.text if isinstance(rollout.prompt, str) else [{"role": "assistant", "content": rollout.text}]
            for rollout in rollouts
        ],
        "completion_ids": [list(rollout.completion.ids) for rollout in rollouts],
    }


async def _gather(
    names: Sequence[str], awaitables: Sequence[Any], step: int, on_finished: Callable[[], None]
) -> list[Any]:
    """Results of all, or the first error; then none of them goes on in the background."""

    async def result(name: str, awaitable: Any) -> Any:
        try:
            value = await awaitable
        except Exception as error:
            raise _named(error, name, step) from error
        on_finished()
        return value

    tasks = [asyncio.ensure_future(result(*pair)) for pair in zip(names, awaitables, strict=True)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _named(error: Exception, name: str, step: int) -> RuntimeError:
    return RuntimeError(f"reward function `{name}` raised {type(error).__name__} at step {step}: {error}")


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # the only way in which asyncio says no
        return False
    return True


# --- what came back --------------------------------------------------------------------------------------------------


def _scores(name: str, values: Any, num_completions: int) -> list[Score]:
    """One checked Score per completion."""
    if isinstance(values, Tensor | np.ndarray):
        if values.ndim != 1:
            raise ValueError(
                f"reward function `{name}` returned an array of shape {tuple(values.shape)}; "
                f"({num_completions},) is needed"
            )
        values = values.tolist()
    if isinstance(values, Score) or not isinstance(values, list | tuple):
        raise TypeError(
            f"reward function `{name}` returned {_shown(values)} as a whole; a list with one value per completion is "
            f"needed, each {_ALLOWED}"
        )
    if len(values) != num_completions:
        raise ValueError(
            f"reward function `{name}` returned {len(values)} rewards for {num_completions} completions; "
            "one per completion is needed"
        )
    return [_score(value, f"reward function `{name}`, completion {i}") for i, value in enumerate(values)]


def _score(value: Any, where: str) -> Score:
    """One value of a reward function as a finite number or None, and text or None."""
    if isinstance(value, Score):
        return Score(_number(value.reward, where), _format_feedback(value.feedback, where))
    if isinstance(value, Mapping):
        # Keys besides these are let through: graders often report more about an answer than its score.
        keys = [key for key in ("reward", "score") if key in value]
        if len(keys) != 1:
            raise TypeError(f"{where}: a dict needs either 'reward' or 'score', got {_shown(value)}")
        return Score(_number(value[keys[0]], where), _format_feedback(value.get("feedback"), where))
    return Score(_number(value, where))


def _number(value: Any, where: str) -> float | None:
    """A finite float; None for None and NaN, which both mean that the function does not apply."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, numbers.Real | np.bool_):
        raise TypeError(f"{where}: {_shown(value)} is not allowed; return {_ALLOWED}")
    size: Any = value  # before it is a float: a large integer has none
    if abs(size) > MAX_REWARD:  # inf too; advantages are computed in float32
        raise ValueError(f"{where}: the reward is {_shown(value)}; its size must be at most {MAX_REWARD:.0e}")
    number = float(value)
    return None if math.isnan(number) else number


def _format_feedback(value: Any, where: str, *, is_named: bool = False) -> str | None:
    """Feedback as text: a list gives a line an item, a dict a line an entry; None stays None, also inside these.

    `is_named`: the value stands under a name, that of a column or of a dict's entry. There a number says something.
    """
    if value is None or isinstance(value, str):
        return value
    if is_named and isinstance(value, numbers.Real | np.bool_):
        return str(value)
    if isinstance(value, list | tuple):
        items = [_format_feedback(item, where, is_named=is_named) for item in value]
        return "\n".join(item for item in items if item is not None)
    if isinstance(value, Mapping):
        entries = {key: _format_feedback(item, where, is_named=True) for key, item in value.items()}
        lines = {key: text for key, text in entries.items() if text is not None}
        return "\n".join(f"{key}:\n{text}" if "\n" in text else f"{key}: {text}" for key, text in lines.items())
    raise TypeError(f"{where}: feedback must be text, a list or dict of texts, or None, got {_shown(value)}")


def _shown(value: Any) -> str:
    """Type and beginning of a value, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:80] + '...'}"


# --- names -----------------------------------------------------------------------------------------------------------


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _name_of(function: Any, index: int) -> str:
    """Name of a reward function: its own, that of what a partial wraps, the last part of a model's id.

    An instance without a `__name__` has the name of its class.

    Raises:
        TypeError: it cannot be called.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, str):
        return function.rstrip("/").split("/")[-1]
    if isinstance(function, PreTrainedModel):
        return function.config.name_or_path.rstrip("/").split("/")[-1] or type(function).__name__
    if not callable(function):
        raise TypeError(
            f"reward function {index} is {_shown(function)}; give a callable, a classification model or its id"
        )
    return str(getattr(function, "__name__", type(function).__name__))


def _unique(names: Sequence[str]) -> list[str]:
    """The names, each repetition with the first suffix _1, _2, ... that is free."""
    taken: list[str] = []
    for name in names:
        candidates = (f"{name}_{n}" for n in range(1, len(names) + 1))
        is_free = name not in taken
        taken.append(name if is_free else next(c for c in candidates if c not in taken and c not in names))
    return taken
