"""Tasks of reasoning-gym: their questions as a data set, and their own scores as reward and feedback."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdpo.rewards.attempts import CUT_OFF, answers_of, column, cut, need_package, truncations
from sdpo.rewards.reasoning_gym_verdict import encode
from sdpo.rewards.sandbox import Level
from sdpo.rewards.workers import Verdict, fork_level, judge_all
from sdpo.templates import did_you_mean
from sdpo.types import Score

if TYPE_CHECKING:
    from datasets import Dataset

INSTRUCTION = "Give the final answer, and nothing else, between <answer> and </answer>."

_OPEN, _CLOSE = "<answer>", "</answer>"
_SHOWN = 300


def reasoning_gym_dataset(
    task: str, num_rows: int, *, seed: int = 0, instruction: str = INSTRUCTION, **settings: Any
) -> Dataset:
    """Rows of a task with `prompt` (one user turn, the question and then `instruction`) and `entry`, JSON text that
    `ReasoningGymReward` reads. `settings` are those of the task, such as its difficulty.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: there is no such task, or a setting is none that JSON can hold.
    """
    need_package("reasoning_gym", extra="reasoning_gym", user="reasoning_gym_dataset")
    import reasoning_gym
    from datasets import Dataset
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS or task == "composite":
        reason = "holds several tasks; make a data set of each and join them" if task == "composite" else "is no task"
        raise ValueError(
            f"{task!r} {reason}.{did_you_mean(task, DATASETS)} The tasks are {', '.join(sorted(DATASETS))}"
        )
    config = {**settings, "seed": seed, "size": num_rows}
    rows = []
    for entry in reasoning_gym.create_dataset(task, **config):
        try:
            text = json.dumps(encode({"task": task, "config": config, "entry": entry}))
        except TypeError as error:
            raise ValueError(f"the settings and entries of {task!r} cannot be kept as JSON: {error}") from error
        content = f"{entry['question']}\n\n{instruction}" if instruction else entry["question"]
        rows.append({"prompt": [{"role": "user", "content": content}], "entry": text})
    return Dataset.from_list(rows)


@dataclass(frozen=True)
class ReasoningGymReward:
    """Reward function: the score of a completion's answer by its task in reasoning-gym, from 0.0 to 1.0.

    The column `entry_column` holds what `reasoning_gym_dataset` wrote; None: the function does not apply. The answer
    is what stands in the last pair of <answer> tags, else the last line. The feedback never holds the right answer.

    Some tasks evaluate the answer as Python, so it is scored in a process that is confined. `level`: None for the
    strongest of "contained" and "restricted" that works; "limited" for none. `seconds` of the processor's time for one
    answer. `num_workers`: answers at once, None for one a core.
    """

    entry_column: str = "entry"
    seconds: int = 5
    num_workers: int | None = None
    level: Level | None = None

    __name__ = "reasoning_gym_reward"

    def __post_init__(self) -> None:
        if self.level == "isolated":
            raise ValueError("level 'isolated' is for programs; 'contained', 'restricted' or 'limited' is needed")
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
            ValueError: no column of entries, or one that was not made by `reasoning_gym_dataset`.
            ImportError: reasoning-gym is not installed.
            RuntimeError: no way to confine a process works here.
        """
        need_package("reasoning_gym", extra="reasoning_gym", user="reasoning_gym_reward")
        count = len(completions)
        entries = column(columns, self.entry_column, count, what="the entries of reasoning-gym are")
        rows = [_row(entry, f"{self.entry_column} of row {i}") for i, entry in enumerate(entries)]
        answers = [find_answer(text) for text in answers_of(completions)]
        cuts = truncations(is_truncated, count)
        # An answer in closed tags is whole, wherever the text was cut; a last line is not.
        is_there = [
            row is not None and answer is not None and (is_tagged or not is_cut)
            for row, (answer, is_tagged), is_cut in zip(rows, answers, cuts, strict=True)
        ]
        judged = iter(self._judge([(rows[i], answers[i][0]) for i in range(count) if is_there[i]]))
        scores = []
        for i, row in enumerate(rows):
            if row is None:
                scores.append(Score(None))
            elif is_there[i]:
                scores.append(self._score(answers[i][0] or "", next(judged)))
            elif cuts[i]:
                scores.append(Score(0.0, f"{CUT_OFF} before it came to a final answer."))
            else:
                scores.append(Score(0.0, f"There is no answer. Give it between {_OPEN} and {_CLOSE}."))
        return scores

    def _judge(self, pairs: Sequence[tuple[Any, str | None]]) -> list[Verdict]:
        level = self.level or fork_level()
        if level is None:
            raise RuntimeError(
                "reasoning-gym evaluates some answers as Python, and no way to confine that works on this machine: "
                "Landlock and seccomp need Linux on x86_64 or aarch64. level='limited' goes without"
            )
        return judge_all(
            "sdpo.rewards.reasoning_gym_verdict",
            [{"row": row, "answer": answer} for row, answer in pairs],
            seconds=self.seconds,
            level=level,
            num_workers=self.num_workers,
        )

    def _score(self, answer: str, verdict: Verdict) -> Score:
        shown = f'The answer "{cut(answer, _SHOWN)}"'
        if verdict.problem == "time":
            return Score(0.0, f"{shown} took more than {self.seconds} s to score.")
        if verdict.problem is not None or not isinstance(verdict.value, float) or not math.isfinite(verdict.value):
            return Score(0.0, f"{shown} cannot be read.")
        reward = min(max(verdict.value, 0.0), 1.0)
        if reward == 1.0:
            return Score(1.0)
        return Score(
            reward, f"{shown} is wrong." if reward == 0 else f"{shown} is not right: it scores {reward:.3g} of 1."
        )


reasoning_gym_reward = ReasoningGymReward()
"""With every setting at its default."""


def find_answer(text: str) -> tuple[str | None, bool]:
    """The answer in a text, None where there is none, and whether it stood in a pair of tags."""
    start = text.rfind(_OPEN)
    if start >= 0:
        answer, close, _ = text[start + len(_OPEN) :].partition(_CLOSE)
        return answer.strip() or None, bool(close)
    line = text.strip().rpartition("\n")[2]
    answer = re.sub(r"^(?:(?:the\s+)?(?:final\s+)?answer\s*(?:is\b|:)\s*:?)", "", line, flags=re.IGNORECASE).strip()
    return answer or None, False


def _row(entry: Any, where: str) -> dict[str, Any] | None:
    """The entry of one row, not yet decoded."""
    if entry is None:
        return None
    try:
        found = json.loads(entry)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is no JSON text ({error}); make the rows with reasoning_gym_dataset") from error
    if not isinstance(found, dict) or not {"task", "config", "entry"} <= found.keys():
        raise ValueError(f"{where} has no task, config and entry; make the rows with reasoning_gym_dataset")
    return found
