"""Trains a model on questions with a verifiable answer by self-distillation, and says how much better it got.

    python examples/sdpo_math.py                                   # a small embedded model on a small task
    python examples/sdpo_math.py --model_name_or_path Qwen/Qwen2.5-Math-1.5B-Instruct --dataset_name openai/gsm8k \
        --dataset_config main --output_dir outputs/sdpo-gsm8k      # any model and any dataset of this kind

Datasets like GSM8K (`question`, `answer` with the result after ####) and like MATH (`problem`, `solution` with the result
in \\boxed{}) are read as they are; one with a `prompt` and an `answer` column is used unchanged. Every setting is a field
of this script's arguments, of `sdpo.SDPOConfig` or of `trl.ModelConfig`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset, load_from_disk
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from sdpo import SDPOConfig, SDPOTrainer, compare_teacher
from sdpo.teacher_check import Estimate

INSTRUCTION = "Reason step by step and put the final answer in \\boxed{}."


@dataclass
class ScriptArguments:
    """What this script adds to `SDPOConfig` and `ModelConfig`."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub id or local folder of the dataset. Default: a small task made here."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split of the held-out questions."})
    feedback_column: str | None = field(
        default=None,
        metadata={"help": "Column whose text the teacher is shown, for example a worked solution; turns feedback on."},
    )
    task: str = field(default="sum", metadata={"help": "Task of examples/demo_tasks.py where no dataset is named."})
    num_test_questions: int = field(default=30, metadata={"help": "Held-out questions to measure accuracy on."})
    num_test_samples: int = field(default=8, metadata={"help": "Answers sampled a held-out question."})
    check_teacher: bool = field(
        default=False, metadata={"help": "Before training, compare the teacher's accuracy with the student's."}
    )


# What a bare `python examples/sdpo_math.py` runs.
DEMO_DEFAULTS: dict[str, Any] = {}


def result_of(solution: str) -> str:
    """The final answer of a worked solution: what follows ####, or else the solution itself for math-verify to read."""
    return solution.rsplit("####", 1)[1].strip().replace(",", "") if "####" in solution else solution


def as_prompts(dataset: Dataset, *, feedback_column: str | None) -> Dataset:
    """Rows with `prompt`, `answer` and, with a feedback column, `privileged_context`.

    Raises:
        ValueError: the columns are of no known kind, or the feedback column is not there.
    """
    columns = dataset.column_names
    pairs = [("question", "answer"), ("problem", "solution"), ("problem", "answer")]
    found = next(((q, a) for q, a in pairs if {q, a} <= set(columns)), None)
    if "prompt" not in columns and found is None:
        raise ValueError(f"Expected columns 'prompt' and 'answer', or one of {pairs}; found {columns}.")
    if feedback_column is not None and feedback_column not in columns:
        raise ValueError(f"There is no column {feedback_column!r}; found {columns}.")

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        new = {}
        if "prompt" not in row:
            question, answer = found
            new["prompt"] = [{"role": "user", "content": f"{row[question]}\n\n{INSTRUCTION}"}]
            new["answer"] = result_of(row[answer])
        if feedback_column is not None:
            new["privileged_context"] = row[feedback_column]
        return new

    return dataset.map(convert, desc="Questions to prompts")


def math_reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the completion's final answer equals the reference, else 0; by math-verify."""
    from math_verify import parse, verify

    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    golds = [a if "\\boxed" in a or "$" in a else f"${a}$" for a in answer]
    return [float(verify(parse(gold), parse(text))) for gold, text in zip(golds, texts, strict=True)]


def load_split(arguments: ScriptArguments, split: str) -> Dataset:
    """One split of the named dataset, from a folder or from the hub."""
    name = arguments.dataset_name
    if os.path.isdir(name) and (Path(name) / "dataset_dict.json").exists():
        return load_from_disk(name)[split]
    return load_dataset(name, arguments.dataset_config, split=split)


def load_data(arguments: ScriptArguments) -> tuple[Dataset, Dataset, Any]:
    """Training questions, held-out questions, and the reward function of both."""
    if arguments.dataset_name is None:
        from demo_tasks import build_task

        task = build_task(arguments.task, num_held_out=arguments.num_test_questions)
        return task.train, task.held_out, task.reward
    train, test = (
        as_prompts(load_split(arguments, split), feedback_column=arguments.feedback_column)
        for split in (arguments.dataset_train_split, arguments.dataset_test_split)
    )
    return train, test.select(range(min(len(test), arguments.num_test_questions))), math_reward


def accuracy(trainer: SDPOTrainer, questions: Dataset, *, num_samples: int) -> Estimate:
    """Share of successful answers at the training temperature, `num_samples` a question."""
    examples = [row for row in questions for _ in range(num_samples)]
    size = trainer.args.eval_batch_size * trainer.args.gradient_accumulation_steps
    rewards: list[float] = []
    from tqdm.auto import tqdm

    batches = range(0, len(examples), size)
    for start in tqdm(batches, desc="Held-out answers", disable=trainer.args.disable_tqdm, leave=False):
        batch = examples[start : start + size]
        scored = trainer.scorer.score(trainer.roll_out(batch, "eval"), batch, trainer_state=trainer.state)
        threshold = trainer.args.success_reward_threshold
        rewards += [float(row.reward is not None and row.reward >= threshold) for row in scored]
    by_question = [sum(rewards[i : i + num_samples]) / num_samples for i in range(0, len(rewards), num_samples)]
    return Estimate.of(by_question)
