"""Successes that a teacher may be shown: which rows are one, which of several is chosen, and the earlier ones.

Pure Python over whole groups.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from sdpo.types import Prompt, RepromptSettings, ScoredRollout

_CLOSED_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


class Demonstration(NamedTuple):
    """The text of a success, with what it is chosen by. `row`: its index in the block, None for an earlier one's."""

    text: str
    reward: float
    num_tokens: int
    row: int | None


class EarlierSuccesses:
    """The latest `size` successes of each prompt, over the blocks of a run."""

    def __init__(self, size: int):
        self.size = size
        self.by_prompt: dict[str, list[Demonstration]] = {}

    def of(self, prompt: Prompt) -> list[Demonstration]:
        """Those of this prompt, the oldest first."""
        return self.by_prompt.get(_key(prompt), []) if self.by_prompt else []

    def add(self, rows: Sequence[ScoredRollout], settings: RepromptSettings) -> None:
        """Takes in a block's successes."""
        if not self.size:
            return
        for found in by_group(rows, settings).values():
            kept = self.by_prompt.setdefault(_key(rows[found[0].row or 0].rollout.prompt), [])
            kept += [demonstration._replace(row=None) for demonstration in found]
            del kept[: -self.size]

    def state_dict(self) -> dict[str, list[tuple[str, float, int, None]]]:
        return {key: [(d.text, d.reward, d.num_tokens, None) for d in kept] for key, kept in self.by_prompt.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[tuple[str, float, int, None]]]) -> None:
        self.by_prompt = {key: [Demonstration(*values) for values in kept] for key, kept in state.items()}


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


def by_group(rows: Sequence[ScoredRollout], settings: RepromptSettings) -> dict[int, list[Demonstration]]:
    """The successes that have something to show, by group, in the rows' order."""
    found: dict[int, list[Demonstration]] = {}
    for index, row in enumerate(rows):
        if row.reward is not None and is_success(row, settings) and (text := shown_text(row.rollout.text, settings)):
            demonstration = Demonstration(text, row.reward, len(row.rollout.completion.ids), index)
            found.setdefault(row.rollout.group, []).append(demonstration)
    return found


def shown_text(text: str, settings: RepromptSettings) -> str:
    """What of a solution is shown; empty where nothing but blanks is left."""
    if settings.remove_thinking_from_demonstration:
        text = remove_thinking(text)
    return text if text.strip() else ""


def choose(
    found: Sequence[Demonstration], settings: RepromptSettings, *, seed: tuple[int, int]
) -> Demonstration | None:
    """One of the successes; the first among equals. None of none."""
    if not found:
        return None
    match settings.demonstration_selection:
        case "first":
            return found[0]
        case "random":
            return random.Random(f"{seed}").choice(found)
        case "shortest":
            return min(found, key=lambda demonstration: demonstration.num_tokens)
        case "best":
            return max(found, key=lambda demonstration: demonstration.reward)


def for_other_ranks(
    rows: Sequence[ScoredRollout], settings: RepromptSettings, *, num_generations: int
) -> list[ScoredRollout]:
    """What other ranks need of this rank's rows: rewards, and the texts that may be shown to their rows' teachers.

    That is the text of a success whose group is not all here, and of every success where earlier ones are kept. Of
    feedback one character stays, enough to count it.
    """
    here = Counter(row.rollout.group for row in rows)
    is_kept = settings.demonstration_buffer_size > 0
    found = []
    for row in rows:
        rollout = row.rollout
        is_asked_for = is_kept or here[rollout.group] < num_generations
        is_shown = settings.use_successful_as_teacher and is_asked_for and is_success(row, settings)
        ids = rollout.completion.ids if is_shown else []
        public = replace(
            rollout,
            prompt=rollout.prompt if is_shown and is_kept else "",
            prompt_ids=[],
            completion=replace(rollout.completion, ids=ids, sampled_logps=None),
            text=rollout.text if is_shown else "",
        )
        feedback = (row.feedback or "").strip()[:1] or None
        found.append(replace(row, rollout=public, feedback=feedback, solution=None, question=None))
    return found


def _key(prompt: Prompt) -> str:
    """A short name for a prompt, the same in every process."""
    return hashlib.sha256(json.dumps(prompt, sort_keys=True, default=str).encode()).hexdigest()[:32]
