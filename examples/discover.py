"""Searches answers to hard questions at test time with `sdpo.discover`, beside two baselines with the same budget.

    python examples/discover.py --questions questions.jsonl --model_name_or_path Qwen/Qwen3-8B   # a line a question
    python examples/discover.py                                        # the demo: hard functions, a small model

A question is a JSON object with a `prompt` (text or messages) and what judges an answer: `tests`, as
`sdpo.rewards.CodeReward` reads them, or `answer`, for mathematics. Every question is searched from `--seeds` seeds by

- `sdpo`: training on failed attempts, whose teacher is shown the feedback;
- `best_of_k`: sampling alone;
- `multi_turn`: sampling from prompts with the feedback about earlier attempts, the latest that fit
  `--max_prompt_length`; `--num_generations` conversations side by side.

The demo takes functions of examples/code_tasks.py that the model nearly never gets right: pass@64 below `--max_pass`,
measured on `--num_select_samples` samples. Written to the output folder after each search are `searches.json`, from
which an interrupted run goes on, and at the end `discovery.png`.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import TrlParser

from sdpo import SDPOConfig, SDPOTrainer, discover
from sdpo.discovery import Attempt, Discovery, as_attempts, discovery_at_k
from sdpo.reprompt import teacher_prompt
from sdpo.rewards import CodeReward, math_reward
from sdpo.types import Prompt, TeacherContext

Row = dict[str, Any]
METHODS = ("sdpo", "best_of_k", "multi_turn")
PASS_AT = 64


@dataclass
class ScriptArguments:
    """What this script adds to `SDPOConfig`."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Path or id. The demo has its own."})
    questions: str | None = field(default=None, metadata={"help": "File of questions, one JSON object a line."})
    budget: int = field(default=256, metadata={"help": "Most generations of a search."})
    seeds: int = field(default=3, metadata={"help": "Searches of each question by each method."})
    methods: list[str] = field(default_factory=lambda: list(METHODS), metadata={"help": f"Which of {METHODS} to run."})
    num_items: int = field(default=10, metadata={"help": "Hard questions that the demo selects."})
    num_select_samples: int = field(default=256, metadata={"help": "Samples of a question to select it by."})
    max_pass: float = field(default=0.5, metadata={"help": f"A question is hard where pass@{PASS_AT} is below this."})


DEMO_DEFAULTS: dict[str, Any] = {
    "--output_dir": "outputs/discover",
    "--include_environment_feedback": True,
    "--reprompt_template": "{prompt}{solution}{feedback}",
    "--solution_template": "\n\n{successful_previous_attempt}",
    "--feedback_template": "\n\n{feedback_raw}",
    "--distillation_mode": "topk_logits",
    "--distillation_topk": 20,
    "--teacher_update_rate": 0.01,
    "--max_completion_length": 64,
    "--num_generations": 16,
    "--per_device_train_batch_size": 16,
    "--learning_rate": 1e-5,
    "--lr_scheduler_type": "constant",
    "--logging_strategy": "no",
    "--diagnostics_warning_interval": 0,
    "--disable_tqdm": True,
    "--gradient_checkpointing": False,
}


# --- one search ------------------------------------------------------------------------------------------------------


class Sampler:
    """Attempts at one question, sampled and scored as `discover` does it, without training."""

    def __init__(self, model: Any, tokenizer: Any, reward: Any, args: SDPOConfig, row: Row):
        self.trainer = SDPOTrainer(model, reward, replace(args, distillation_weight=0.0), [row], None, tokenizer)
        self.row = row
        self.settings = self.trainer.reprompt

    def sample(self, prompts: Sequence[Prompt], *, first: int = 1) -> list[Attempt]:
        """One attempt for each prompt; `first` is the index of the first one."""
        examples = [{**self.row, "prompt": prompt} for prompt in prompts]
        rollouts = self.trainer.roll_out(examples, "eval")
        scored = self.trainer.scorer.score(rollouts, examples, trainer_state=self.trainer.state)
        return as_attempts(scored, first=first, step=0, settings=self.settings)

    def num_tokens(self, prompt: Prompt) -> int:
        return len(self.trainer.tokenizer.encode([prompt])[0])


def search(sampler: Sampler, next_prompts: Callable[[Sequence[Attempt]], list[Prompt]], *, budget: int) -> Discovery:
    """Samples block after block until one holds a success. `next_prompts` makes a block's from the block before."""
    start = time.perf_counter()
    attempts: list[Attempt] = []
    block: list[Attempt] = []
    while len(attempts) < budget and not any(attempt.is_success for attempt in block):
        block = sampler.sample(next_prompts(block), first=len(attempts) + 1)
        attempts += block
    return Discovery.of(attempts, steps=0, seconds=time.perf_counter() - start)


def best_of_k(sampler: Sampler, *, budget: int, num_generations: int) -> Discovery:
    """Sampling from the question alone."""
    return search(sampler, lambda _: [sampler.row["prompt"]] * num_generations, budget=budget)


def multi_turn(sampler: Sampler, *, budget: int, num_generations: int, max_prompt_length: int) -> Discovery:
    """Sampling from the question with the feedback about earlier attempts of the same conversation, not the attempts.

    The prompt is written with the templates of the teacher; the oldest feedback is left out where it would not fit.
    """
    windows: list[list[str]] = [[] for _ in range(num_generations)]

    def prompt(window: list[str]) -> Prompt:
        context = TeacherContext(feedback="\n\n".join(window))
        return teacher_prompt(sampler.row["prompt"], context, sampler.settings)

    def next_prompts(block: Sequence[Attempt]) -> list[Prompt]:
        for window, attempt in zip(windows, block, strict=False):  # none before the first block
            window += [attempt.feedback] if attempt.feedback else []
            while window and sampler.num_tokens(prompt(window)) > max_prompt_length:
                window.pop(0)
        return [prompt(window) for window in windows]

    return search(sampler, next_prompts, budget=budget)


# --- the questions ---------------------------------------------------------------------------------------------------


def read_questions(path: str) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError: a row without a prompt, or without anything to judge an answer by.
    """
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    for i, row in enumerate(rows, start=1):
        if "prompt" not in row or not {"tests", "answer"} & row.keys():
            raise ValueError(f"{path}, question {i}: needs 'prompt', and 'tests' or 'answer'; found {sorted(row)}.")
    return rows


def reward_of(row: Row) -> Any:
    """The reward function that a question is judged by."""
    if "tests" in row:
        return CodeReward(use_hidden=True)
    return math_reward


def pass_at(k: int, *, num_samples: int, num_successes: int) -> float:
    """Unbiased estimate of the probability that one of k samples is a success (Chen et al. 2021, eq. 1)."""
    return 1.0 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def select_hard(
    rows: Sequence[Row],
    counter_of: Callable[[Row], Callable[[int], int]],
    *,
    num_items: int,
    num_samples: int,
    max_pass: float,
    round_size: int = 32,
) -> list[tuple[Row, float]]:
    """The first `num_items` rows with pass@64 below `max_pass`, and that estimate.

    `counter_of(row)` returns a function that samples n answers and counts the successes. A row is left as soon as it
    has too many.

    Raises:
        ValueError: too few samples to know pass@64, or fewer hard rows than asked for.
    """
    if num_samples < PASS_AT:
        raise ValueError(
            f"num_select_samples={num_samples} says nothing about pass@{PASS_AT}; set at least {PASS_AT}."
        )
    hard: list[tuple[Row, float]] = []
    for row in rows:
        count_successes = counter_of(row)
        num_sampled = num_successes = 0
        passed = 0.0
        while num_sampled < num_samples and passed < max_pass:
            size = min(round_size, num_samples - num_sampled)
            num_successes += count_successes(size)
            num_sampled += size
            passed = pass_at(PASS_AT, num_samples=num_samples, num_successes=num_successes)
        if passed < max_pass:
            hard.append((row, passed))
        if len(hard) == num_items:
            return hard
    raise ValueError(
        f"Only {len(hard)} of {len(rows)} questions have pass@{PASS_AT} below {max_pass}, and num_items={num_items}. "
        "Raise max_pass or lower num_items."
    )


def demo_rows() -> list[Row]:
    """All functions of the demo, private tests hidden: they decide on success and are not told about."""
    from code_tasks import FUNCTIONS, code_rows

    return code_rows(FUNCTIONS, "all")


# --- the run ---------------------------------------------------------------------------------------------------------


def table(searches: Sequence[Row], *, budget: int) -> str:
    """Solved questions, discovery@k and time of each method, as Markdown."""
    ks = [k for k in (2**i for i in range(3, 20)) if k < budget] + [budget]
    lines = [
        f"| method | questions solved | {' | '.join(f'discovery@{k}' for k in ks)} | seconds a search |",
        "|" + "---|" * (len(ks) + 3),
    ]
    for method, indices in by_method(searches).items():
        seconds = [s["seconds"] for s in searches if s["method"] == method]
        solved = sum(any(index is not None for index in of_question) for of_question in indices)
        found = " | ".join(map(str, discovery_at_k(indices, ks, budget=budget)))
        mean = sum(seconds) / len(seconds)
        lines.append(f"| {method} | {solved} of {len(indices)} | {found} | {mean:.0f} |")
    return "\n".join(lines)


def by_method(searches: Sequence[Row]) -> dict[str, list[list[int | None]]]:
    """Discovery indices by method and question."""
    found: dict[str, dict[int, list[int | None]]] = {}
    for s in searches:
        found.setdefault(s["method"], {}).setdefault(s["item"], []).append(s["index"])
    return {method: list(of_method.values()) for method, of_method in found.items()}


def plot(searches: Sequence[Row], path: Path, *, budget: int) -> None:
    """Discovery@k against k, with 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    ks = list(range(1, budget + 1))
    for method, indices in by_method(searches).items():
        points = discovery_at_k(indices, ks, budget=budget)
        (line,) = axes.plot(ks, [p.mean for p in points], label=method)
        axes.fill_between(ks, [p.low for p in points], [p.high for p in points], color=line.get_color(), alpha=0.15)
    axes.set(xlabel="generations k", ylabel="discovery@k", xscale="log", ylim=(0, 1))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def parse(arguments: list[str]) -> tuple[ScriptArguments, SDPOConfig]:
    """Settings of the script and of the searches; those of the demo come first where no questions are named.

    Raises:
        ValueError: an unknown method, or questions without a model.
    """
    named = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in arguments if word.startswith("--")}
    words = [str(word) for pair in DEMO_DEFAULTS.items() for word in pair] if "questions" not in named else []
    script, config = TrlParser((ScriptArguments, SDPOConfig), allow_abbrev=False).parse_args_and_config(
        [*words, *arguments]
    )
    if unknown := set(script.methods) - set(METHODS):
        raise ValueError(f"methods: {sorted(unknown)} are unknown; there are {list(METHODS)}.")
    if script.questions is not None and script.model_name_or_path is None:
        raise ValueError("questions needs a model: name one with --model_name_or_path.")
    return script, config


def main(arguments: list[str]) -> None:
    script, args = parse(arguments)
    path = script.model_name_or_path
    if path is None:
        from demo_model import embedded_model

        path = embedded_model()
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = read_questions(script.questions) if script.questions else hard_rows(script, model, tokenizer, args, folder)
    kept = folder / "searches.json"
    searches: list[Row] = json.loads(kept.read_text()) if kept.exists() else []
    done = {(s["item"], s["seed"], s["method"]) for s in searches}
    for item, row in enumerate(rows):
        for seed in range(script.seeds):
            for method in script.methods:
                if (item, seed, method) in done:
                    continue
                found = one_search(method, model, tokenizer, args, row, budget=script.budget, seed=seed)
                print(f"question {item}, seed {seed}, {method}: {found}", flush=True)
                searches.append({"item": item, "seed": seed, "method": method, **summary(found)})
                kept.write_text(json.dumps(searches, indent=1))
    print(table(searches, budget=script.budget))
    plot(searches, folder / "discovery.png", budget=script.budget)


def one_search(
    method: str, model: Any, tokenizer: Any, args: SDPOConfig, row: Row, *, budget: int, seed: int
) -> Discovery:
    """One question, searched by one method from one seed."""
    num_generations, reward = args.num_generations, reward_of(row)
    columns = {name: value for name, value in row.items() if name != "prompt"}
    if method == "sdpo":
        return discover(
            model,
            row["prompt"],
            reward,
            budget=budget,
            num_generations=num_generations,
            columns=columns,
            args=args,
            processing_class=tokenizer,
            seed=seed,
        )
    sampler = Sampler(model, tokenizer, reward, replace(args, seed=seed), row)
    if method == "best_of_k":
        return best_of_k(sampler, budget=budget, num_generations=num_generations)
    length = args.max_prompt_length
    return multi_turn(sampler, budget=budget, num_generations=num_generations, max_prompt_length=length)


def summary(found: Discovery) -> Row:
    """What is kept of a search."""
    best = None if found.best is None else asdict(found.best)
    return {"index": found.index, "steps": found.steps, "seconds": found.seconds, "best": best}


def hard_rows(script: ScriptArguments, model: Any, tokenizer: Any, args: SDPOConfig, folder: Path) -> list[Row]:
    """The demo's hard questions, kept in the output folder, so that a run that goes on has the same."""
    kept = folder / "questions.jsonl"
    if not kept.exists():

        def counter_of(row: Row) -> Callable[[int], int]:
            sampler = Sampler(model, tokenizer, reward_of(row), args, row)
            return lambda number: sum(a.is_success for a in sampler.sample([row["prompt"]] * number))

        hard = select_hard(
            demo_rows(),
            counter_of,
            num_items=script.num_items,
            num_samples=script.num_select_samples,
            max_pass=script.max_pass,
        )
        kept.write_text("".join(json.dumps({**row, "pass_at_64": passed}) + "\n" for row, passed in hard))
    return read_questions(str(kept))


if __name__ == "__main__":
    main(sys.argv[1:])
