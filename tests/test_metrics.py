"""A mean is sum over sum; what the model computed is never hidden, and an unknown reward never shows."""

from __future__ import annotations

import math

import pytest
import torch

from sdpo.metrics import Metrics, StageClock, merge


def logged(*parts: Metrics) -> dict[str, float | None]:
    return merge([part.snapshot() for part in parts])


def test_a_mean_is_the_sum_of_numerators_over_the_sum_of_denominators() -> None:
    first, second = Metrics(), Metrics()
    first.add("x", 6.0, 2)
    first.add("x", torch.tensor(1.0), torch.tensor(1.0))
    second.add("x", 1.0, 1)
    assert logged(first, second) == {"x": 2.0}  # (6 + 1 + 1) / (2 + 1 + 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_the_model_computed_is_shown_though_it_is_not_finite(bad: float) -> None:
    metrics = Metrics()
    metrics.add_all({"loss": (torch.tensor(bad), torch.tensor(3.0))})
    metrics.add_all({"loss": (torch.tensor(1.0), torch.tensor(3.0))})
    again = Metrics()
    again.restore(metrics.snapshot())
    other = Metrics()
    other.add("loss", torch.tensor(1.0), 1)
    for value in (logged(metrics)["loss"], logged(again, other)["loss"]):
        assert value is not None and (math.isnan(value) if math.isnan(bad) else value == bad)


def test_an_unknown_reward_counts_as_nothing() -> None:
    metrics = Metrics()
    for reward in (1.0, None, math.nan):
        metrics.add("reward", reward)
    assert logged(metrics) == {"reward": 1.0}


def test_a_name_without_things_is_none() -> None:
    metrics = Metrics()
    metrics.add("mean", 0.0, 0)
    metrics.add_min("low", [])
    metrics.add_max("high", [])
    assert logged(metrics) == {"mean": None, "low": None, "high": None}


def test_extremes_are_those_of_everything_added() -> None:
    metrics = Metrics()
    for values in ([3.0, 5.0], [], [4.0]):
        metrics.add_min("low", values)
        metrics.add_max("high", values)
    assert logged(metrics) == {"low": 3.0, "high": 5.0}


def test_a_name_holds_one_pair_however_much_is_added() -> None:
    metrics = Metrics()
    for _ in range(100):
        metrics.add("x", torch.tensor(1.0), torch.tensor(2.0))
        metrics.add_min("low", [1.0])
    assert [len(pair) for pair in metrics._sums.values()] == [2] and metrics._lows == {"low": 1.0}
    assert logged(metrics)["x"] == 0.5


def test_a_count_grows_beyond_what_float32_can_count() -> None:
    metrics = Metrics()
    metrics.add("x", 0.0, torch.tensor(2.0**24))
    metrics.add("x", 1.0, torch.tensor(1.0))
    assert metrics.snapshot()["sums"]["x"] == (1.0, 2.0**24 + 1)


def test_time_is_divided_by_the_steps_counted_since_the_last_log() -> None:
    clock = StageClock()
    clock._seconds["train"] = 6.0
    for _ in range(3):
        clock.count_step()
    assert clock.per_step() == {"time/train": 2.0}
    with clock.timed("train"):
        clock.count_step()
    assert 0.0 <= clock.per_step()["time/train"] < 1.0
    assert clock.per_step() == {}
