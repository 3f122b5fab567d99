"""One hard question at test time: the policy learns from its failed attempts until one succeeds (paper, sec. 5)."""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from sdpo import distributed
from sdpo.config import SDPOConfig
from sdpo.demonstrations import is_success
from sdpo.trainer import SDPOTrainer
from sdpo.types import Phase, Prompt, RepromptSettings, Row, ScoredRollout


@dataclass(frozen=True, slots=True)
class Attempt:
    """One generation. `index` counts from 1 over the whole search; `step`: optimizer steps that came before it."""

    index: int
    step: int
    text: str
    reward: float | None
    feedback: str | None
    is_success: bool


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a search found.

    `index`: of the first success, in generations (the paper's discovery time); None where the budget held none.
    `best`: the attempt with the highest reward, the earliest of equals; None where no attempt has a reward.
    `attempts`: all of them in order, to the end of the block with the success. `steps`: optimizer steps made.
    """

    index: int | None
    best: Attempt | None
    attempts: tuple[Attempt, ...]
    steps: int
    seconds: float

    @classmethod
    def of(cls, attempts: Sequence[Attempt], *, steps: int, seconds: float) -> Discovery:
        """The discovery that these attempts are."""
        index = next((attempt.index for attempt in attempts if attempt.is_success), None)
        rewarded = [attempt for attempt in attempts if attempt.reward is not None]
        best = max(rewarded, key=lambda attempt: attempt.reward or 0.0, default=None)
        return cls(index, best, tuple(attempts), steps, seconds)

    def __str__(self) -> str:
        found = "no success" if self.index is None else f"success at generation {self.index}"
        return f"{found} of {len(self.attempts)} sampled, {self.steps} steps, {self.seconds:.0f} s"


def as_attempts(rows: Sequence[ScoredRollout], *, first: int, step: int, settings: RepromptSettings) -> list[Attempt]:
    """The rows as attempts; `first` is the index of the first one."""
    return [
        Attempt(
            index=index,
            step=step,
            text=row.rollout.text,
            reward=row.reward,
            feedback=row.feedback,
            is_success=is_success(row, settings),
        )
        for index, row in enumerate(rows, start=first)
    ]


def discover(
    model: Any,
    prompt: Prompt,
    reward: Any,
    *,
    budget: int,
    num_generations: int = 16,
    columns: Mapping[str, Any] | None = None,
    args: SDPOConfig | None = None,
    processing_class: Any = None,
    seed: int | None = None,
    on_attempt: Callable[[Attempt], None] | None = None,
) -> Discovery:
    """Searches a successful answer to one question, training on failed attempts as it goes.

    A step samples `num_generations` attempts and trains on them; with the first success, or after `budget` attempts,
    the search is over and the last block is not trained on. The model that is passed stays as it is, weights, modes
    and all: a copy of it is trained, which shares the parameters that are not trained (all but an adapter).

    Args:
        model: path or id, a `PreTrainedModel`, or a `PeftModel`.
        prompt: the question, a string or messages.
        reward: as the `reward_funcs` of `SDPOTrainer`. Feedback is all there is to learn from before a success.
        budget: most attempts, a multiple of `num_generations`.
        columns: what the reward functions read besides, one value a column, for example `{"tests": ...}`.
        args: other settings, such as `SDPOConfig.preset("test_time", learning_rate=1e-5)`; None for the preset itself.
            The arguments here, the batch that follows from them, and no saving or evaluation take the place of what
            `args` says.
        processing_class: tokenizer; the model's own by default.
        seed: of sampling; that of `args` by default.
        on_attempt: called with every attempt as soon as it has a reward.

    Raises:
        ValueError: a budget that is no multiple of `num_generations`, a column called prompt, or what `SDPOTrainer`
            refuses.
    """
    if "prompt" in (columns or {}):
        raise ValueError("columns has an entry 'prompt'; the question goes into the argument prompt.")
    start = time.perf_counter()
    attempts: list[Attempt] = []
    try:
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
            settings = _settings(args, folder, budget=budget, num_generations=num_generations, seed=seed)
            trainer = _Search(
                model=model if isinstance(model, str) else _working_copy(model, settings),
                reward_funcs=reward,
                args=settings,
                train_dataset=[{"prompt": prompt, **(columns or {})}],
                processing_class=processing_class,
            )
            steps = trainer.search(attempts, budget=budget, on_attempt=on_attempt or (lambda attempt: None))
            del trainer
    finally:
        gc.collect()  # a trainer refers to itself, and the next question should not wait for its memory
    return Discovery.of(attempts, steps=steps, seconds=time.perf_counter() - start)


class _Over(Exception):
    """The search has what it looked for, or has used up its budget."""


class _Search(SDPOTrainer):
    """A run on one question that looks at each block before training on it."""

    attempts: list[Attempt]
    budget: int
    on_attempt: Callable[[Attempt], None]

    def search(self, attempts: list[Attempt], *, budget: int, on_attempt: Callable[[Attempt], None]) -> int:
        """Optimizer steps made until the search was over; `attempts` is filled on the way."""
        self.attempts, self.budget, self.on_attempt = attempts, budget, on_attempt
        with suppress(_Over):
            self.train()
        steps: int = self.state.global_step
        return steps

    def _add_contexts(self, scored: list[ScoredRollout], phase: Phase) -> list[Row]:
        own = as_attempts(scored, first=1, step=self.state.global_step, settings=self.reprompt)
        # Those of all ranks, so that all stop at the same block.
        for attempt in distributed.gather_rows(own, self.accelerator)[0]:
            self.attempts.append(replace(attempt, index=len(self.attempts) + 1))
            self.on_attempt(self.attempts[-1])
        if len(self.attempts) >= self.budget or any(attempt.is_success for attempt in self.attempts):
            raise _Over
        return super()._add_contexts(scored, phase)


def _settings(
    args: SDPOConfig | None, folder: str, *, budget: int, num_generations: int, seed: int | None
) -> SDPOConfig:
    """Settings of a search: one block a step, and as many steps as the budget has blocks."""
    if num_generations < 1:
        raise ValueError(f"num_generations={num_generations} must be at least 1.")
    if budget < 1 or budget % num_generations:
        below = max(1, budget // num_generations) * num_generations
        raise ValueError(
            f"budget={budget} is not a positive multiple of num_generations={num_generations}, which a step samples. "
            f"Set budget to {below} or {below + num_generations}, or change num_generations."
        )
    if args is None:
        args = SDPOConfig.preset(
            "test_time",
            output_dir=folder,
            num_generations=num_generations,
            per_device_train_batch_size=1,  # the update does not depend on it, the memory does
            logging_strategy="no",
            disable_tqdm=True,
            diagnostics_warning_interval=0,  # blocks without a success are what a search is made of
        )
    at_once = args.per_device_train_batch_size * args.world_size
    if num_generations % at_once:
        raise ValueError(
            f"num_generations={num_generations} attempts make a step, which per_device_train_batch_size "
            f"({args.per_device_train_batch_size}) * {args.world_size} processes = {at_once} does not divide. Set "
            "per_device_train_batch_size so that it does."
        )
    changes: dict[str, Any] = {
        "num_generations": num_generations,
        "generation_batch_size": num_generations,
        "steps_per_generation": None,
        "gradient_accumulation_steps": num_generations // at_once,
        "max_steps": budget // num_generations * args.num_iterations,
        "seed": args.seed if seed is None else seed,
        "save_strategy": "no",
        "eval_strategy": "no",
    }
    return replace(args, **changes)


def _working_copy(model: nn.Module, args: SDPOConfig) -> nn.Module:
    """A copy to train. It shares the parameters that are not trained, where they are on the device of the run.

    (Elsewhere the trainer would move them there, away from the model that was passed.)
    """
    shared = {id(p): p for p in model.parameters() if not p.requires_grad and p.device.type == args.device.type}
    return copy.deepcopy(model, memo=dict(shared))


# --- many searches ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiscoveryAtK:
    """P(discovery time <= k), and a bootstrap interval of it."""

    k: int
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def discovery_at_k(
    indices: Sequence[Sequence[int | None]],
    ks: Sequence[int],
    *,
    budget: int,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> list[DiscoveryAtK]:
    """Share of searches with a success within k generations (paper, eq. 4), the mean over questions.

    `indices` holds for each question the `Discovery.index` of its searches, one a seed, all of the same `budget`; None
    where there was no success. Of independent attempts this is pass@k. The interval is of percentiles over
    `num_resamples` samples, with replacement, of the questions and for each of its seeds.

    Raises:
        ValueError: no question, a question without a search, an index outside of the budget, or a k beyond it, of
            which the searches say nothing.
    """
    if not indices or not all(indices):
        raise ValueError("discovery_at_k needs at least one question, and at least one search of each.")
    wrong = [index for runs in indices for index in runs if index is not None and not 1 <= index <= budget]
    if wrong or not all(1 <= k <= budget for k in ks):
        raise ValueError(
            f"With budget={budget}, indices and ks lie in 1 to {budget}; got indices {wrong} and ks {list(ks)}."
        )
    # (searches, len(ks)) for each question: whether it had its success by then
    found = [np.array([[index is not None and index <= k for k in ks] for index in runs], float) for runs in indices]
    means = np.mean([of_question.mean(0) for of_question in found], axis=0)
    random = np.random.default_rng(seed)
    resampled = np.empty((num_resamples, len(ks)))
    for i in range(num_resamples):
        chosen = [found[question] for question in random.integers(len(found), size=len(found))]
        resampled[i] = np.mean([runs[random.integers(len(runs), size=len(runs))].mean(0) for runs in chosen], axis=0)
    rest = (1 - confidence) / 2
    low, high = np.quantile(resampled, [rest, 1 - rest], axis=0)
    return [DiscoveryAtK(k, *map(float, values)) for k, *values in zip(ks, means, low, high, strict=True)]
