"""A mean is sum over sum; what the model computed is never hidden, and an unknown reward never shows."""

from __future__ import annotations

import ast
import inspect
import math
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ScriptedGenerator, TrainerFactory

import sdpo.trainer
from sdpo.metric_table import METRICS
from sdpo.metrics import EDGES, Metrics, StageClock, merge
from sdpo.types import Completion, LossTerms, TokenTerms


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


# --- quantiles -------------------------------------------------------------------------------------


def test_quantiles_are_within_a_bin_of_the_true_ones_whatever_the_cut_into_parts() -> None:
    torch.manual_seed(0)
    values = torch.randn(4, 2500) * torch.tensor([[0.01], [0.1], [1.0], [5.0]])
    parts = [Metrics(), Metrics()]
    for i, row in enumerate(values):
        parts[i % 2].add_histogram("credit", row, torch.ones_like(row, dtype=torch.bool))
    found = logged(*parts)
    for share in (0.05, 0.25, 0.5, 0.75, 0.95):
        true = values.flatten().quantile(share).item()
        # A bin is 5 % wide, and 1e-4 nats around 0.
        assert found[f"credit/q{round(100 * share):02d}"] == pytest.approx(true, rel=0.05, abs=2e-4)


def test_quantiles_are_of_the_masked_entries_and_beyond_the_edges_they_are_the_edge() -> None:
    metrics = Metrics()
    values = torch.tensor([[-1000.0, 7.0, 1000.0], [7.0, 7.0, -1000.0]])
    metrics.add_histogram("x", values, torch.tensor([[True, False, True], [False, False, True]]))
    found = logged(metrics)
    assert found["x/q05"] == found["x/q50"] == EDGES[0] and found["x/q95"] == EDGES[-1]
    assert EDGES[-1] == pytest.approx(100, rel=0.05)
    metrics.clear()
    metrics.add_histogram("x", values, torch.zeros_like(values, dtype=torch.bool))
    assert logged(metrics)["x/q50"] is None


def test_a_histogram_survives_a_snapshot_and_goes_on() -> None:
    metrics, again = Metrics(), Metrics()
    mask = torch.ones(100, dtype=torch.bool)
    metrics.add_histogram("x", torch.full((100,), -1.0), mask)
    again.restore(metrics.snapshot())
    again.add_histogram("x", torch.full((100,), 1.0), mask)
    found = logged(again)
    assert found["x/q25"] == pytest.approx(-1, rel=0.05) and found["x/q75"] == pytest.approx(1, rel=0.05)


def test_the_spread_of_the_credit_is_over_distilled_tokens() -> None:
    credit = torch.tensor([[0.05, -0.05, 2.0, 9.0], [-1.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    metrics = Metrics()
    terms = TokenTerms(logps=credit, entropy=credit, credit=credit)
    loss = LossTerms(torch.tensor(0.0), {"loss": (torch.tensor(3.0), torch.tensor(2.0))})
    batch = SimpleNamespace(distillation_mask=mask)
    metrics.add_microbatch(loss, terms, batch)  # type: ignore[arg-type]
    found = logged(metrics)
    assert found["loss"] == 1.5 and found["credit/sparsity"] == 0.5  # 0.05 and -0.05 of four
    assert found["credit/q95"] == pytest.approx(2, rel=0.05)
    metrics.clear()
    metrics.add_microbatch(loss, TokenTerms(logps=credit, entropy=credit), batch)  # type: ignore[arg-type]
    assert logged(metrics) == {"loss": 1.5}


# --- the table of names ----------------------------------------------------------------------------------------------

TABLE = [metric.name for section in METRICS for metric in section.metrics]
OF_TRANSFORMERS = re.compile(r"(eval|train)_(loss|runtime|samples_per_second|steps_per_second)")


class Sampler(ScriptedGenerator):
    """The script, with a log-prob of its own for each token, as vLLM has them."""

    def generate(self, prompt_ids: list[list[int]]) -> list[Completion]:
        return [Completion(c.ids, c.is_truncated, [-1.0] * len(c.ids)) for c in super().generate(prompt_ids)]


def names_of_a_run(make_trainer: TrainerFactory) -> set[str]:
    """Names logged by a run that has every part: both terms, a reference, blocks used twice, a sampler, evaluation."""
    trainer = make_trainer(
        distillation_weight=0.5,
        beta=0.1,
        num_iterations=2,
        max_steps=2,
        prompts=["w10 w11", "w12"],
        trainer_kwargs={"eval_dataset": [{"prompt": "w10"}]},
    )
    trainer.generator = Sampler(trainer.tokenizer.tokenizer, ["w1 w2", "w3"])
    trainer.args.use_vllm = True  # the correction acts with vLLM's completions
    trainer.train()
    trainer.evaluate()
    logged = {name for entry in trainer.state.log_history for name in entry if not OF_TRANSFORMERS.fullmatch(name)}
    return {name.removeprefix("eval_").replace("scripted_reward", "<name>") for name in logged}


def test_every_metric_of_a_run_is_in_the_table_and_every_metric_of_the_table_in_a_run(
    make_trainer: TrainerFactory,
) -> None:
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(sdpo.trainer))) if isinstance(node, ast.Call)]
    stages = {f"time/{ast.literal_eval(c.args[0])}" for c in calls if ast.unparse(c.func) == "self.clock.timed"}
    logged = names_of_a_run(make_trainer)
    of_trainer = {"loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos"}
    assert logged - of_trainer <= set(TABLE)
    assert logged | stages >= set(TABLE)  # all but the stage of a server, which has a test of its own


def test_a_name_is_once_in_the_table() -> None:
    assert len(TABLE) == len(set(TABLE))
