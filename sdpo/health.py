"""What goes wrong in a run, read from its logged metrics: each check takes a history and gives a warning or None.

A history is a list of windows, oldest first. A window holds the mean of each metric over `WINDOW_STEPS` optimizer
steps, or over `WINDOW_LOGS` logs where those take longer: a mean over some hundreds of completions, so that single
blocks do not matter. The first window is how the run began. A check of a level or of a change asks for it in two
windows in a row; a metric that is not logged is never at fault. Thresholds are far from what healthy runs show, since
a warning that is given for nothing is not read: factors of two and more, not per cents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

WINDOW_STEPS = 20
WINDOW_LOGS = 3
STALLED_WINDOWS = 6  # 120 steps

Log = Mapping[str, float | None]
History = Sequence[Mapping[str, float]]

GAP = "self_distillation/distillation_loss"
LENGTH = "completions/mean_length"
CLIPPED = "completions/clipped_ratio"
ACTIVE = "self_distillation/reprompt_sample_fraction"
SUCCESS = "self_distillation/success_group_fraction"
LONE = "self_distillation/lone_success_fraction"
SHORTENED = "teacher_prompts/shortened_fraction"
SPREAD = "self_distillation/reward_std"


class Windows:
    """The history of a run, from its logs as they come."""

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []
        self._logs: list[Log] = []
        self._start = 0.0  # the step after which the window in the making begins

    def add(self, log: Log) -> bool:
        """Takes in the log of some steps of training, with its `step`; true where a window is complete."""
        self._logs.append(log)
        step = log["step"] or 0.0
        if step - self._start < WINDOW_STEPS or len(self._logs) < WINDOW_LOGS:
            return False
        self.history.append(_means(self._logs))
        self._logs, self._start = [], step
        return True


def _means(logs: Sequence[Log]) -> dict[str, float]:
    """Means by name over the logs that have a finite number of it, and the last step."""
    found: dict[str, list[float]] = {}
    for log in logs:
        for name, value in log.items():
            if isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, []).append(value)
    return {**{name: sum(values) / len(values) for name, values in found.items()}, "step": logs[-1]["step"] or 0.0}


def _last(history: History, name: str, number: int = 2) -> list[float]:
    """The metric in the last windows, empty where one lacks it or there are too few."""
    found = [window[name] for window in history[-number:] if name in window]
    return found if len(found) == number else []


def _change(history: History, name: str) -> tuple[float, list[float]] | None:
    """The metric in the first window, and in the last two; None without three windows that have it."""
    if len(history) < 3 or name not in history[0] or not (last := _last(history, name)):
        return None
    return history[0][name], last


# --- checks ----------------------------------------------------------------------------------------------------------


def no_gap(history: History) -> str | None:
    """The first window's divergence is under 1e-4 nats a token in size: 0.1 nats over a completion of 1,000 tokens."""
    gap = history[0].get(GAP) if history else None
    if gap is None or abs(gap) >= 1e-4 or history[0].get(ACTIVE, 0.0) == 0:
        return None
    return (
        f"Teacher and student hardly differ from the start ({GAP} {gap:.1e} nats), so there is nothing to learn: look "
        "at the teacher's prompts (log_completions=True), run compare_teacher, or give feedback that says more."
    )


def growing_gap(history: History) -> str | None:
    """The divergence is above three times the first window's and 0.1 nats more; it should shrink."""
    if (found := _change(history, GAP)) is None:
        return None
    first, last = found
    if min(last) <= max(3 * first, first + 0.1):
        return None
    return (
        f"Teacher and student drift apart: {GAP} was {first:.3g} nats in the first window and is {last[-1]:.3g}. Try "
        "a lower learning_rate, or a teacher that follows the student (teacher_model_kind='ema')."
    )


def entropy_fall(history: History) -> str | None:
    """The entropy is under a fifth of the first window's, where that was 0.05 nats at least."""
    if (found := _change(history, "entropy")) is None:
        return None
    first, last = found
    if first < 0.05 or max(last) >= first / 5:
        return None
    return (
        f"The policy narrows: entropy was {first:.3g} nats in the first window and is {last[-1]:.3g}, so completions "
        "become alike. Try a lower learning_rate, a teacher that moves more slowly (teacher_update_rate), or beta "
        "with distillation_weight below 1, and keep the checkpoint from before the fall."
    )


def entropy_rise(history: History) -> str | None:
    """The entropy is above twice the first window's and 1 nat more: on its way to random words."""
    if (found := _change(history, "entropy")) is None:
        return None
    first, last = found
    if min(last) <= max(2 * first, first + 1.0):
        return None
    return (
        f"The policy comes apart: entropy was {first:.3g} nats in the first window and is {last[-1]:.3g}. Go back to "
        "an earlier checkpoint with a lower learning_rate or max_grad_norm."
    )


def longer(history: History) -> str | None:
    """The mean length is above twice the first window's, and the reward is no higher than it was."""
    if (found := _change(history, LENGTH)) is None:
        return None
    first, last = found
    if min(last) <= 2 * first or _has_risen(history):
        return None
    clipped = history[-1].get(CLIPPED, 0.0)
    return (
        f"Completions grow and the reward does not: {LENGTH} was {first:.4g} tokens in the first window and is "
        f"{last[-1]:.4g}, {clipped:.0%} cut at the limit. Look at what the teacher is shown, lower learning_rate, or "
        "set mask_truncated_completions=True."
    )


def shorter(history: History) -> str | None:
    """The mean length is under a third of the first window's, and the reward is no higher than it was.

    Shorter answers that are as good are what self-distillation is known for, so the length alone says nothing.
    """
    if (found := _change(history, LENGTH)) is None:
        return None
    first, last = found
    if max(last) >= first / 3 or _has_risen(history):
        return None
    return (
        f"Completions shrink and the reward does not rise: {LENGTH} was {first:.4g} tokens in the first window and is "
        f"{last[-1]:.4g}. The student may copy how short a demonstration is: keep its "
        "thinking (remove_thinking_from_demonstration=False), change solution_template, or lower learning_rate."
    )


def cut_off(history: History) -> str | None:
    """More than half of the completions are cut at the limit."""
    last = _last(history, CLIPPED)
    if not last or min(last) <= 0.5:
        return None
    return (
        f"{last[-1]:.0%} of the completions are cut at max_completion_length ({CLIPPED}), and most rewards need an "
        "end. Raise it, ask for shorter answers in the prompt, or check that the chat template's end token is known."
    )


def few_active(history: History) -> str | None:
    """Fewer than a tenth of the rows have a teacher that knows more, but some do; none at all is told at once."""
    last = _last(history, ACTIVE)
    if not last or max(last) >= 0.1 or last[-1] == 0:
        return None
    return (
        f"Few rows teach: {last[-1]:.1%} have a demonstration or feedback ({ACTIVE}). Take easier questions, raise "
        "num_generations, return feedback (include_environment_feedback=True), or set demonstration_buffer_size or "
        "demonstration_column."
    )


def lone_successes(history: History) -> str | None:
    """More than half of the groups with a success have one alone, where a tenth of the groups has any."""
    lone, success = _last(history, LONE), _last(history, SUCCESS)
    if not lone or not success or min(success) < 0.1:
        return None
    if any(one <= some / 2 for one, some in zip(lone, success, strict=True)):
        return None
    return (
        f"Most successes are alone: {lone[-1]:.0%} of the groups have exactly one ({LONE}) of {success[-1]:.0%} that "
        "have any, and it has no demonstration for itself. Raise num_generations, or set demonstration_buffer_size or "
        "demonstration_column."
    )


def shortened_prompts(history: History) -> str | None:
    """More than a tenth of the rows have a context that did not fit."""
    last = _last(history, SHORTENED)
    if not last or min(last) <= 0.1:
        return None
    return (
        f"The teacher does not see all it is shown: the contexts of {last[-1]:.0%} of the rows are cut to "
        f"max_reprompt_len ({SHORTENED}). Raise it, shorten the feedback, or show shorter demonstrations "
        "(demonstration_selection='shortest', remove_thinking_from_demonstration=True)."
    )


def _rise(history: History) -> float | None:
    """Reward of the last two windows less that of the first, in standard deviations of the rewards of a block."""
    found = _change(history, "reward")
    spread = max(history[0].get(SPREAD, 0.0), history[-1].get(SPREAD, 0.0)) if history else 0.0
    if found is None or spread == 0:
        return None
    first, last = found
    return (sum(last) / len(last) - first) / spread


def _has_risen(history: History) -> bool:
    """By a tenth of a standard deviation: the mean of 20 blocks of 32 completions is known to a 25th."""
    rise = _rise(history)
    return rise is not None and rise > 0.1


def stalled(history: History) -> str | None:
    """After six windows the reward is no higher than in the first, though a tenth of the groups or more still fail.

    A run that has learned and levels off is not meant, and neither is one whose questions are solved.
    """
    if len(history) < STALLED_WINDOWS or _rise(history) is None or _has_risen(history):
        return None
    if history[-1].get(SUCCESS, 0.0) > 0.9:
        return None
    first, last = history[0]["reward"], history[-1]["reward"]
    return (
        f"The reward has not risen in {history[-1]['step']:.0f} steps: {first:.3g} in the first window, {last:.3g} "
        "now. Run compare_teacher to see whether the teacher is better at all, look at what it is shown "
        "(log_completions=True), or raise learning_rate if the loss hardly falls."
    )


def collapse(history: History) -> str | None:
    """The reward is under its best by more than half a standard deviation of the rewards of a block.

    The best is what two windows in a row had.
    With rewards of 0 and 1, of which 80 % were 1 at best, that is below 55 %: the standard deviation there is 0.5.
    """
    last = _last(history, "reward")
    if len(history) < 3 or not last:
        return None
    rewards = [window.get("reward", -math.inf) for window in history]
    reward, index = max((min(rewards[i - 1 : i + 1]), i) for i in range(1, len(rewards)))
    best, now = history[index], history[-1]
    spread = max(best.get(SPREAD, 0.0), now.get(SPREAD, 0.0))
    if spread == 0 or max(last) >= reward - spread / 2:
        return None
    beside = [
        f"{name} {best[name]:.3g} -> {now[name]:.3g}" for name in ("entropy", LENGTH) if name in best and name in now
    ]
    return (
        f"The run collapses: the reward was {reward:.3g} up to step {best['step']:.0f} and is {last[-1]:.3g} "
        f"({', '.join(beside) or 'no entropy logged'}). Go back to a checkpoint from about step {best['step']:.0f} "
        "with a lower learning_rate and a teacher that moves more slowly (a smaller teacher_update_rate, or 'base'), "
        "and keep the best one (metric_for_best_model)."
    )


CHECKS: dict[str, Callable[[History], str | None]] = {
    "no_gap": no_gap,
    "growing_gap": growing_gap,
    "entropy_fall": entropy_fall,
    "entropy_rise": entropy_rise,
    "longer": longer,
    "shorter": shorter,
    "cut_off": cut_off,
    "few_active": few_active,
    "lone_successes": lone_successes,
    "shortened_prompts": shortened_prompts,
    "stalled": stalled,
    "collapse": collapse,
}


def findings(history: History) -> dict[str, str]:
    """The warnings of this history, by name of the check."""
    found = {name: check(history) for name, check in CHECKS.items()}
    return {name: message for name, message in found.items() if message is not None}
