"""The search for one answer at test time: where it stops, what it leaves alone, and what many searches say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_model
from peft import LoraConfig, get_peft_model

from sdpo import Score, SDPOConfig, discover
from sdpo.discovery import Attempt, Discovery, _settings, _working_copy, discovery_at_k

Search = Callable[..., Discovery]


def succeeds_at(*indices: int) -> Callable[..., list[Score]]:
    """Reward 1 for the attempts with these indices, counted from 1; feedback for all others."""
    given: Iterator[int] = iter(range(1, 10**9))

    def reward(completions: list[Any], **_: Any) -> list[Score]:
        return [Score(1.0) if next(given) in indices else Score(0.0, "w30 w31") for _ in completions]

    return reward


@pytest.fixture
def search(tokenizer: Any, tmp_path: Path) -> Search:
    """`discover` on the tiny model, four attempts a step."""

    def search(model: Any = None, reward: Any = None, *, prompt: Any = "w10 w11", **arguments: Any) -> Discovery:
        settings = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 2,
            "max_completion_length": 6,
            "learning_rate": arguments.pop("learning_rate", 1e-2),
            "use_cpu": True,
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            "save_strategy": "steps",
        }
        return discover(
            make_model(tokenizer) if model is None else model,
            prompt,
            succeeds_at() if reward is None else reward,
            **{
                "budget": 12,
                "num_generations": 4,
                "args": SDPOConfig.preset("test_time", **settings),
                "processing_class": tokenizer,
                **arguments,
            },
        )

    return search


def state_of(model: Any) -> dict[str, Any]:
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "trained": {name: p.requires_grad for name, p in model.named_parameters()},
        "rates": [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)],
        "modes": [m.training for m in model.modules()],
        "hooks": [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()],
        "forward": model.forward.__func__,
        "generation": model.generation_config.to_dict(),
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    weights = [bool(torch.equal(before["weights"][name], value)) for name, value in after["weights"].items()]
    return all(weights) and all(before[name] == after[name] for name in before if name != "weights")


# --- where it stops --------------------------------------------------------------------------------------------------


def test_the_index_counts_generations_and_the_block_of_the_success_is_not_trained_on(search: Search) -> None:
    found = search(reward=succeeds_at(7, 8))
    # two blocks of 4: the first is trained on, the second holds the success
    assert (found.index, found.steps, len(found.attempts)) == (7, 1, 8)
    assert [attempt.index for attempt in found.attempts] == list(range(1, 9))
    assert [attempt.step for attempt in found.attempts] == [0] * 4 + [1] * 4
    assert found.best == found.attempts[6] and found.best.is_success
    assert str(found).startswith("success at generation 7 of 8 sampled, 1 steps")


def test_a_success_at_once_trains_nothing(search: Search) -> None:
    found = search(reward=succeeds_at(1))
    assert (found.index, found.steps, len(found.attempts)) == (1, 0, 4)


def test_without_a_success_the_budget_is_used_up_and_its_last_block_not_trained_on(search: Search) -> None:
    found = search()
    assert (found.index, found.steps, len(found.attempts)) == (None, 2, 12)
    assert found.best == found.attempts[0]  # all have reward 0: the earliest
    assert found.attempts[0].feedback == "w30 w31"


def test_attempts_are_told_as_they_come(search: Search) -> None:
    told: list[Attempt] = []
    found = search(reward=succeeds_at(6), on_attempt=told.append)
    assert tuple(told) == found.attempts


def test_the_best_attempt_has_the_highest_reward_there_is() -> None:
    def attempt(index: int, reward: float | None) -> Attempt:
        return Attempt(index, 0, "", reward, None, is_success=False)

    attempts = [attempt(1, None), attempt(2, -2.0), attempt(3, -1.0), attempt(4, -1.0)]
    assert Discovery.of(attempts, steps=0, seconds=0.0).best == attempts[2]
    assert Discovery.of(attempts[:1], steps=0, seconds=0.0).best is None


# --- what it does with the model -------------------------------------------------------------------------------------


def interrupted(completions: list[Any], trainer_state: Any, **_: Any) -> list[Score]:
    if trainer_state.global_step:
        raise KeyboardInterrupt
    return [Score(0.0, "w30")] * len(completions)


def broken(completions: list[Any], trainer_state: Any, **_: Any) -> list[Score]:
    if trainer_state.global_step:
        raise ZeroDivisionError
    return [Score(0.0, "w30")] * len(completions)


@pytest.mark.parametrize("reward", [succeeds_at(11), succeeds_at(), interrupted, broken])
@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_the_model_is_as_it_was(search: Search, tokenizer: Any, kind: str, reward: Any) -> None:
    model: Any = make_model(tokenizer)
    model.register_buffer("counter", torch.zeros(3))
    model.add_module("drop", torch.nn.Dropout(0.5))
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    model.train()
    before = state_of(model)
    if reward in (interrupted, broken):
        with pytest.raises(KeyboardInterrupt if reward is interrupted else RuntimeError):
            search(model, reward)
    else:
        search(model, reward)
    assert same(before, state_of(model))


def test_the_copy_learns_from_its_failures_and_a_seed_repeats_a_search(search: Search) -> None:
    def texts(learning_rate: float) -> list[str]:
        return [attempt.text for attempt in search(seed=3, learning_rate=learning_rate).attempts]

    # The first block comes before any update, the second after one.
    still, moved = texts(0.0), texts(1e-1)
    assert still[:4] == moved[:4] and still[4:8] != moved[4:8]
    assert moved == texts(1e-1)


def test_an_adapter_shares_its_base(tokenizer: Any) -> None:
    def addresses(model: Any, *, is_trained: bool) -> set[int]:
        return {p.data_ptr() for p in model.parameters() if p.requires_grad is is_trained}

    model = get_peft_model(make_model(tokenizer), LoraConfig(target_modules=["q_proj"], r=2))
    twin = _working_copy(model, SDPOConfig(output_dir="unused", use_cpu=True))
    assert addresses(twin, is_trained=False) == addresses(model, is_trained=False)
    assert not addresses(twin, is_trained=True) & addresses(model, is_trained=True)


def test_the_random_state_of_torch_is_left_alone(search: Search, tokenizer: Any) -> None:
    model = make_model(tokenizer)
    before = torch.get_rng_state()
    search(model)
    assert torch.equal(before, torch.get_rng_state())


# --- what it is given ------------------------------------------------------------------------------------------------


def test_columns_and_messages_reach_the_reward(search: Search) -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list[Any], completions: list[Any], tests: list[str], **_: Any) -> list[Score]:
        seen.update(prompt=prompts[0], tests=tests, completion=completions[0])
        return [Score(1.0)] * len(completions)

    prompt = [{"role": "user", "content": "w1"}]
    search(reward=reward, prompt=prompt, columns={"tests": "T"})
    assert (seen["prompt"], seen["tests"]) == (prompt, ["T"] * 4)
    assert seen["completion"][0]["role"] == "assistant"


def test_without_settings_it_is_the_papers() -> None:
    args = _settings(None, "unused", budget=64, num_generations=16, seed=5)
    assert (args.max_steps, args.generation_batch_size, args.gradient_accumulation_steps, args.seed) == (4, 16, 16, 5)
    assert (args.learning_rate, args.distillation_topk, args.distillation_alpha) == (1e-6, 20, 1.0)
    assert (args.save_strategy, args.eval_strategy, args.steps_per_generation) == ("no", "no", 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 10}, "budget=10 is not a positive multiple of num_generations=4"),
        ({"budget": 0}, "Set budget to 4 or 8"),
        ({"num_generations": 0}, "num_generations=0 must be at least 1"),
        ({"columns": {"prompt": "w1"}}, "goes into the argument prompt"),
        ({"num_generations": 3, "budget": 6}, r"per_device_train_batch_size \(2\) \* 1 processes = 2 does not divide"),
    ],
)
def test_what_cannot_be_is_refused(search: Search, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(**arguments)


# --- discovery@k -----------------------------------------------------------------------------------------------------


def test_discovery_at_k_is_the_share_of_searches_that_found_by_then() -> None:
    # k = 4: 1/2 and 0; k = 8: 2/2 and 1/2
    points = discovery_at_k([[3, 8], [None, 5]], [4, 8], budget=16)
    assert [(p.k, p.mean) for p in points] == [(4, 0.25), (8, 0.75)]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_of_shuffled_attempts_it_is_the_unbiased_pass_at_k(k: int) -> None:
    """Six attempts, two of them right, in every order: the mean is 1 - C(4, k) / C(6, k)."""
    orders = set(permutations([True, True, False, False, False, False]))
    [point] = discovery_at_k([[order.index(True) + 1 for order in orders]], [k], budget=6, num_resamples=10)
    assert point.mean == pytest.approx(1 - comb(4, k) / comb(6, k))


def test_of_independent_attempts_it_is_pass_at_k() -> None:
    """Discovery times are geometric: P(time <= k) = 1 - 0.8^k, here 0.5904 at k = 4, within four standard errors."""
    times = np.random.default_rng(0).geometric(0.2, size=4000)
    indices = [[int(t) if t <= 16 else None] for t in times]
    [point] = discovery_at_k(indices, [4], budget=16, num_resamples=10)
    assert abs(point.mean - 0.5904) < 4 * (0.5904 * 0.4096 / 4000) ** 0.5


def test_the_interval_is_the_spread_of_resampled_questions_and_seeds() -> None:
    # Equal searches leave nothing to chance.
    [point] = discovery_at_k([[2, 2], [2, 2]], [4], budget=4)
    assert (point.low, point.mean, point.high) == (1.0, 1.0, 1.0)
    # 40 questions of which half are always solved: the standard error is sqrt(0.25 / 40) = 0.079 whatever the seeds.
    [point] = discovery_at_k([[1] * 3, [None] * 3] * 20, [4], budget=4)
    assert (point.high - point.low) / (2 * 1.96) == pytest.approx(0.079, abs=0.008)
    # One question, 40 seeds: the same by the seeds alone.
    [point] = discovery_at_k([[1, None] * 20], [4], budget=4)
    assert (point.high - point.low) / (2 * 1.96) == pytest.approx(0.079, abs=0.008)


def test_what_the_searches_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="With budget=8"):
        discovery_at_k([[3]], [9], budget=8)
    with pytest.raises(ValueError, match=r"got indices \[12\]"):
        discovery_at_k([[12]], [4], budget=8)
    with pytest.raises(ValueError, match="at least one search"):
        discovery_at_k([[1], []], [1], budget=8)
