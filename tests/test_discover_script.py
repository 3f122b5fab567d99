"""examples/discover.py: which questions are hard, the two baselines, and a whole run on a tiny model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import discover as script
import pytest
from conftest import make_model

from sdpo import Score, SDPOConfig

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


# --- selection -------------------------------------------------------------------------------------------------------


def test_pass_at_k_is_that_of_drawing_without_replacement() -> None:
    # 4 samples, 1 right, 2 drawn: it is among them in half of the cases; 2 right: missed in 1 of 6
    assert script.pass_at(2, num_samples=4, num_successes=1) == 0.5
    assert script.pass_at(2, num_samples=4, num_successes=2) == pytest.approx(5 / 6)
    assert script.pass_at(2, num_samples=4, num_successes=0) == 0.0


def test_the_first_rows_that_are_hard_are_taken_and_others_are_left_early() -> None:
    """Of 256 samples, two successes make pass@64 0.44 and three 0.58."""
    successes = {"easy": 32, "three": 3, "two": 2, "none": 0, "more": 0}
    sampled: dict[str, int] = {}

    def counter_of(row: dict[str, Any]) -> Callable[[int], int]:
        def count(number: int) -> int:
            sampled[row["prompt"]] = sampled.get(row["prompt"], 0) + number
            return successes[row["prompt"]] if sampled[row["prompt"]] == number else 0

        return count

    rows = [{"prompt": name} for name in successes]
    hard = script.select_hard(rows, counter_of, num_items=2, num_samples=256, max_pass=0.5)
    assert [(row["prompt"], round(passed, 2)) for row, passed in hard] == [("two", 0.44), ("none", 0.0)]
    assert sampled == {"easy": 32, "three": 32, "two": 256, "none": 256}
    sampled.clear()
    with pytest.raises(ValueError, match=r"Only 3 of 5 questions have pass@64 below 0\.5"):
        script.select_hard(rows, counter_of, num_items=4, num_samples=256, max_pass=0.5)
    with pytest.raises(ValueError, match="set at least 64"):
        script.select_hard(rows, counter_of, num_items=1, num_samples=32, max_pass=0.5)


# --- baselines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def sampler_of(tokenizer: Any, tmp_path: Path) -> Callable[[Any], script.Sampler]:
    def make(reward: Any) -> script.Sampler:
        args = SDPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            disable_tqdm=True,
            max_completion_length=4,
            num_generations=2,
            per_device_train_batch_size=2,
            include_environment_feedback=True,
            reprompt_template="{prompt}{solution}{feedback}",
            feedback_template=" {feedback_raw}",
        )
        return script.Sampler(make_model(tokenizer), tokenizer, reward, args, {"prompt": "w1 w2", "answer": "w3"})

    return make


def test_best_of_k_stops_at_the_block_of_the_success(sampler_of: Any) -> None:
    asked: list[str] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[Score]:
        asked.extend(prompts)
        return [Score(float(len(asked) == 6)), Score(0.0)]

    found = script.best_of_k(sampler_of(reward), budget=10, num_generations=2)
    assert (found.index, len(found.attempts), found.steps) == (5, 6, 0)
    assert asked == ["w1 w2"] * 6
    assert script.best_of_k(sampler_of(lambda completions, **_: [0.0] * 2), budget=4, num_generations=2).index is None


def test_multi_turn_shows_the_latest_feedback_that_fits(sampler_of: Any) -> None:
    """Two conversations, each with its own feedback; five tokens hold the question and three of feedback."""
    asked: list[str] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[Score]:
        turn = len(asked) // 2
        asked.extend(prompts)
        return [Score(0.0, f"w{10 + turn}"), Score(0.0, f"w{20 + turn}" if turn else None)]

    script.multi_turn(sampler_of(reward), budget=10, num_generations=2, max_prompt_length=5)
    first, second = asked[::2], asked[1::2]
    assert [" ".join(prompt.split()) for prompt in first] == [
        "w1 w2", "w1 w2 w10", "w1 w2 w10 w11", "w1 w2 w10 w11 w12", "w1 w2 w11 w12 w13",
    ]  # fmt: skip
    assert [" ".join(prompt.split()) for prompt in second[:3]] == ["w1 w2", "w1 w2", "w1 w2 w21"]


# --- a whole run -----------------------------------------------------------------------------------------------------


def test_the_table_counts_questions_and_generations() -> None:
    searches = [
        {"item": item, "seed": seed, "method": "best_of_k", "index": index, "seconds": 2.0}
        for item, seed, index in ((0, 0, 3), (0, 1, None), (1, 0, None), (1, 1, None))
    ]
    head, _, line = script.table(searches, budget=16).splitlines()
    assert head == "| method | questions solved | discovery@8 | discovery@16 | seconds a search |"
    assert line.startswith("| best_of_k | 1 of 2 | 0.250 [") and line.endswith("| 2 |")


def test_questions_without_a_judge_are_refused(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"prompt": "w1", "answer": "2"}\n\n{"prompt": "w1"}\n')
    with pytest.raises(ValueError, match="question 2: needs 'prompt', and 'tests' or 'answer'; found \\['prompt'\\]"):
        script.read_questions(str(tmp_path / "q.jsonl"))


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="the curve needs matplotlib")
def test_a_run_goes_on_where_it_was(tokenizer: Any, tmp_path: Path, capsys: Any) -> None:
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    tests = json.dumps({"type": "functional", "fn_name": "f", "tests": [{"input": [1], "output": 1}]})
    (tmp_path / "q.jsonl").write_text(json.dumps({"prompt": "w1 w2", "tests": tests}))
    line = f"""
        --questions {tmp_path / "q.jsonl"} --model_name_or_path {tmp_path / "model"} --output_dir {tmp_path / "out"}
        --budget 8 --seeds 1 --num_generations 4 --per_device_train_batch_size 4 --max_completion_length 4 --use_cpu
        --include_environment_feedback true --disable_tqdm true --gradient_checkpointing false"""
    script.main(line.split())
    searches = json.loads((tmp_path / "out" / "searches.json").read_text())
    assert [(s["method"], s["index"]) for s in searches] == [(method, None) for method in script.METHODS]
    assert [s["steps"] for s in searches] == [1, 0, 0]
    assert (tmp_path / "out" / "discovery.png").stat().st_size > 1000
    capsys.readouterr()
    script.main(line.split())
    assert "question 0" not in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "searches.json").read_text()) == searches
