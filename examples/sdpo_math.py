"""Trains a model on questions with a verifiable answer by self-distillation, and says how much better it got.

    python examples/sdpo_math.py                                   # the demo: a small embedded model, a small task
    python examples/sdpo_math.py --model_name_or_path Qwen/Qwen2.5-Math-1.5B-Instruct --dataset_name openai/gsm8k \
        --dataset_config main --output_dir outputs/sdpo-gsm8k      # any model and any dataset of this kind

Datasets like GSM8K (`question`, `answer` with the result after ####) and like MATH (`problem`, `solution` with the
result in \\boxed{}) are read as they are; one with a `prompt` and an `answer` column is used unchanged. The reward is
`sdpo.rewards.math_reward`; with --include_environment_feedback the teacher is shown what it says about an attempt.
Every setting is a field of this script's arguments, of `sdpo.SDPOConfig` or of `trl.ModelConfig`. Without a model, a
dataset and a file of settings (--config), the demo's settings come first; otherwise both a model and a dataset are to
be named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import common
from common import CommonArguments, Data
from datasets import Dataset
from trl import ModelConfig

from sdpo import SDPOConfig, SDPOTrainer
from sdpo.rewards import math_reward

INSTRUCTION = "Reason step by step and put the final answer in \\boxed{}."


@dataclass
class ScriptArguments(CommonArguments):
    """What this script adds to the other recipes' arguments."""

    feedback_column: str | None = field(
        default=None,
        metadata={"help": "Column whose text the teacher is shown, for example a worked solution; turns feedback on."},
    )
    task: str | None = field(default=None, metadata={"help": "The demo's task, one of examples/demo_tasks.py."})


# What a bare `python examples/sdpo_math.py` runs.
# The template keeps the format of the answer, and the learning rate and the divergence are mild: a small model that is
# pulled towards a teacher of another format loses its own (see docs/feedback.md). Half of the loss is the policy
# gradient, which helps models of this size.
DEMO_DEFAULTS: dict[str, Any] = {
    "--output_dir": "outputs/demo",
    "--task": "sum",
    "--check_teacher": True,
    "--reprompt_template": "{prompt}{solution}{feedback}",
    "--solution_template": " {successful_previous_attempt}",
    "--distillation_weight": 0.5,
    "--distillation_mode": "topk_logits",
    "--distillation_topk": 20,
    "--distillation_alpha": 0.5,
    "--max_completion_length": 16,
    "--num_generations": 8,
    "--per_device_train_batch_size": 64,
    "--per_device_eval_batch_size": 128,
    "--learning_rate": 2e-5,
    "--lr_scheduler_type": "constant_with_warmup",
    "--warmup_steps": 3,
    "--max_steps": 15,
    "--logging_steps": 1,
    "--save_strategy": "no",
    "--gradient_checkpointing": False,
}


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
            new["answer"] = row[answer]
        if feedback_column is not None:
            new["privileged_context"] = row[feedback_column]
        return new

    return dataset.map(convert, desc="Questions to prompts")


def math_reward_alone(**given: Any) -> list[float | None]:
    """`math_reward` without its feedback, in the place of which the teacher is shown the feedback column."""
    return [score.reward for score in math_reward(**given)]


def load_data(arguments: ScriptArguments) -> Data:
    """Training questions, held-out questions, and the reward function of both."""
    if arguments.dataset_name is None:
        from demo_tasks import build_task

        task = build_task(arguments.task, num_held_out=arguments.num_test_questions)
        label = f"the task {arguments.task} of examples/demo_tasks.py"
        return Data(task.train, {common.HELD_OUT: task.held_out}, task.reward, label)
    train, test = (
        as_prompts(common.load_split(arguments, split), feedback_column=arguments.feedback_column)
        for split in (arguments.dataset_train_split, arguments.dataset_test_split)
    )
    tests = {common.HELD_OUT: common.head(test, arguments.num_test_questions)}
    reward = math_reward if arguments.feedback_column is None else math_reward_alone
    return Data(train, tests, reward, arguments.dataset_name)


def parse(arguments: list[str]) -> tuple[ScriptArguments, SDPOConfig, ModelConfig]:
    """The three groups of settings, see `common.parse`."""
    return common.parse(
        ScriptArguments,
        arguments,
        demo=DEMO_DEFAULTS,
        only_in_demo={"task": "with a dataset; it names the demo's task"},
        only_with_dataset={"feedback_column": "in the demo, which has no columns"},
    )


def main(arguments: list[str], *, on_trainer: Callable[[SDPOTrainer], None] | None = None) -> None:
    """The whole script. `on_trainer` is called with the trainer once it is built, for measurements."""
    script, config, model_arguments = parse(arguments)
    if script.feedback_column is not None:
        config = replace(config, include_environment_feedback=True)
    common.run(script, config, model_arguments, load_data(script), on_trainer=on_trainer)


if __name__ == "__main__":
    main(sys.argv[1:])
