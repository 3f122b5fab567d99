"""Each fault of a run is told from a history that shows it, and none from a healthy one."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from conftest import TrainerFactory
from transformers import TrainerControl, TrainerState

from sdpo.callbacks import HealthWarnings
from sdpo.health import CHECKS, WINDOW_LOGS, WINDOW_STEPS, Windows, findings
from sdpo.metric_table import METRICS

HEALTHY = {
    "entropy": (0.8, 0.4),
    "reward": (0.3, 0.8),
    "self_distillation/distillation_loss": (0.2, 0.05),
    "self_distillation/reprompt_sample_fraction": (0.6, 0.9),
    "self_distillation/success_group_fraction": (0.7, 0.95),
    "self_distillation/lone_success_fraction": (0.3, 0.05),
    "self_distillation/reward_std": (0.46, 0.4),
    "teacher_prompts/shortened_fraction": (0.0, 0.02),
    "completions/mean_length": (400.0, 180.0),  # shorter and better, as self-distillation does
    "completions/clipped_ratio": (0.2, 0.02),
}
FLAT = {"reward": (0.3, 0.31), "self_distillation/success_group_fraction": (0.7, 0.7)}
# How metrics go from the first step to the last, where that is not as in a healthy run, and a word of the advice.
FAULTS: dict[str, tuple[dict[str, tuple[float, float]], str]] = {
    "no_gap": ({"self_distillation/distillation_loss": (5e-5, 5e-5)}, "compare_teacher"),
    "growing_gap": ({"self_distillation/distillation_loss": (0.1, 1.0)}, "drift apart"),
    "entropy_fall": ({"entropy": (0.8, 0.02)}, "0.0198"),
    "entropy_rise": ({"entropy": (0.8, 6.0)}, "max_grad_norm"),
    "longer": ({**FLAT, "completions/mean_length": (200.0, 900.0)}, "mask_truncated_completions"),
    "shorter": ({**FLAT, "completions/mean_length": (400.0, 20.0)}, "remove_thinking_from_demonstration"),
    "cut_off": ({"completions/clipped_ratio": (0.7, 0.9)}, "max_completion_length"),
    "few_active": ({"self_distillation/reprompt_sample_fraction": (0.03, 0.03)}, "3.1%"),
    "lone_successes": ({"self_distillation/lone_success_fraction": (0.6, 0.6)}, "num_generations"),
    "shortened_prompts": ({"teacher_prompts/shortened_fraction": (0.3, 0.3)}, "max_reprompt_len"),
    "stalled": (FLAT, "has not risen in 200 steps"),
    "collapse": ({"reward": (0.8, 0.1), "self_distillation/reward_std": (0.4, 0.3)}, "entropy"),
}


def logs(changes: dict[str, tuple[float, float]], *, num: int = 200, noise: float = 0.1) -> list[dict[str, float]]:
    """A log a step, each metric on a line between its values over four fifths of the run, times 1 +- noise."""
    drawn = random.Random(0)
    found = []
    for step in range(1, num + 1):
        share = min(1.0, step / num / 0.8)
        values = {n: (a + (b - a) * share) * drawn.gauss(1, noise) for n, (a, b) in {**HEALTHY, **changes}.items()}
        found.append({"step": step, "loss": 0.1, **values})
    return found


def history_of(found: list[dict[str, Any]]) -> list[dict[str, float]]:
    windows = Windows()
    for log in found:
        windows.add(log)
    return windows.history


def test_the_checks_are_all_here_and_read_metrics_that_exist() -> None:
    assert FAULTS.keys() == CHECKS.keys()
    assert HEALTHY.keys() <= {metric.name for section in METRICS for metric in section.metrics}


def test_nothing_is_told_of_a_healthy_run_at_any_time_of_it() -> None:
    history = history_of(logs({}))
    assert len(history) == 200 / WINDOW_STEPS
    assert [findings(history[: i + 1]) for i in range(len(history))] == [{}] * len(history)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_with_its_number_and_what_to_try(name: str) -> None:
    changes, word = FAULTS[name]
    found = findings(history_of(logs(changes)))
    assert word in found[name] and any(character.isdigit() for character in found[name])
    beside = {"longer", "shorter", "stalled"} if name in ("longer", "shorter", "collapse") else set()
    assert found.keys() <= {name} | beside


def test_one_bad_step_is_no_fault() -> None:
    """Windows of 20 steps: a value of 20 times the usual in one of them doubles its mean at most, once."""
    for name in HEALTHY:
        found = logs({}, noise=0.0)
        found[150][name] = found[150][name] * 20 if "fraction" not in name and "ratio" not in name else 1.0
        history = history_of(found)
        assert [findings(history[: i + 1]) for i in range(len(history))] == [{}] * len(history), name


def test_a_run_that_levels_off_or_is_solved_is_not_stalled() -> None:
    levels_off = logs({"reward": (0.3, 0.6)}, num=100) + [{**log, "step": log["step"] + 100} for log in logs(FLAT)]
    for log in levels_off[100:]:
        log["reward"] = 0.6
    solved = logs({"reward": (0.97, 0.97), "self_distillation/success_group_fraction": (1.0, 1.0)})
    assert "stalled" not in findings(history_of(levels_off)) and "stalled" not in findings(history_of(solved))


def test_a_window_holds_three_logs_where_those_take_longer_than_twenty_steps() -> None:
    every_fifty = [{"step": 50 * i, "entropy": float(i)} for i in range(1, 8)]
    assert [window["entropy"] for window in history_of(every_fifty)] == [2.0, 5.0]  # of 1, 2, 3 and of 4, 5, 6
    assert WINDOW_LOGS == 3


def test_what_is_missing_none_or_not_finite_is_left_out() -> None:
    found = [{"step": i, "reward": None, "entropy": math.nan if i % 2 else 1.0} for i in range(1, 101)]
    history = history_of(found)
    assert all("reward" not in window and window["entropy"] == 1.0 for window in history)
    assert findings(history) == {} and findings([]) == {}


# --- the callback ----------------------------------------------------------------------------------------------------


def told(records: Any, text: str) -> int:
    return sum(text in record.getMessage() for record in records)


def feed(callback: HealthWarnings, found: list[dict[str, float]], *, is_main: bool = True) -> TrainerState:
    state = TrainerState(is_world_process_zero=is_main)
    for log in found:
        state.log_history.append(log)
        state.global_step = int(log["step"])
        callback.on_log(None, state, TrainerControl())
    return state


def test_a_fault_is_told_once_a_run_also_when_it_is_resumed(caplog: pytest.LogCaptureFixture) -> None:
    found, text = logs(FAULTS["lone_successes"][0]), "Most successes are alone"
    state = feed(HealthWarnings(), found[:100])
    assert told(caplog.records, text) == 1
    again = HealthWarnings()
    again.on_train_begin(None, state, TrainerControl())
    feed(again, found[100:])
    assert told(caplog.records, text) == 1


def test_the_main_process_alone_tells(caplog: pytest.LogCaptureFixture) -> None:
    feed(HealthWarnings(), logs(FAULTS["lone_successes"][0]), is_main=False)
    assert not caplog.records


@pytest.mark.parametrize(("settings", "number"), [({}, 1), ({"diagnostics_warning_interval": 0}, 0)])
def test_a_run_tells_of_itself_unless_it_is_to_be_quiet(
    make_trainer: TrainerFactory, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], number: int
) -> None:
    """Every completion is cut: two windows of 20 steps."""
    make_trainer(max_steps=2 * WINDOW_STEPS, truncated=True, **settings).train()
    assert told(caplog.records, "100% of the completions are cut at max_completion_length") == number


def test_the_warnings_can_be_taken_out(make_trainer: TrainerFactory, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(max_steps=2 * WINDOW_STEPS, truncated=True)
    trainer.remove_callback(HealthWarnings)
    trainer.train()
    assert told(caplog.records, "are cut at max_completion_length") == 0
