"""Trains a model to follow checkable instructions by self-distillation: the teacher is told which rule was broken.

    python examples/sdpo_instructions.py                           # the demo: a small embedded model, short answers
    python examples/sdpo_instructions.py --model_name_or_path Qwen/Qwen3-1.7B --dataset_name google/IFEval \
        --preset rich_feedback --max_completion_length 1024 --output_dir outputs/sdpo-instructions

Read are data sets with the columns of IFEval (`prompt`, `instruction_id_list`, `kwargs`), or with a `prompt` and the
rules in `instructions`. Without a split of their own, `--num_test_questions` rows are held out of the training split.
Settings are fields of this script's arguments, of `sdpo.SDPOConfig` and of `trl.ModelConfig`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import common
from common import CommonArguments, Data
from datasets import Dataset
from trl import ModelConfig

from sdpo import SDPOConfig, SDPOTrainer
from sdpo.rewards import InstructionReward


@dataclass
class ScriptArguments(CommonArguments):
    """What this script adds to the other recipes' arguments."""

    dataset_test_split: str | None = field(
        default=None, metadata={"help": "Split of the held-out questions. None: held out of the training split."}
    )
    is_strict: bool = field(
        default=False,
        metadata={"help": "Reward 1 where all rules of a question are followed, else 0, not their share."},
    )


# What a bare `python examples/sdpo_instructions.py` runs. The temperature is below 1, where a model of this size is
# too noisy to make use of what it is shown, and the feedback follows the question without further words.
DEMO_DEFAULTS: dict[str, Any] = {
    "--output_dir": "outputs/instructions",
    "--check_teacher": True,
    "--num_test_questions": 20,
    "--num_test_samples": 4,
    "--is_strict": True,
    "--include_environment_feedback": True,
    "--reprompt_template": "{prompt}{feedback}{solution}",
    "--feedback_template": " {feedback_raw}",
    "--solution_template": "\nCorrect solution:\n\n{successful_previous_attempt}\n\n\n"
    "Correctly solve the original question.\n",
    "--temperature": 0.6,
    "--distillation_weight": 0.5,
    "--distillation_mode": "topk_logits",
    "--distillation_topk": 20,
    "--distillation_alpha": 0.5,
    "--max_completion_length": 32,
    "--num_generations": 8,
    "--per_device_train_batch_size": 32,
    "--per_device_eval_batch_size": 128,
    "--learning_rate": 2e-5,
    "--lr_scheduler_type": "constant_with_warmup",
    "--warmup_steps": 2,
    "--max_steps": 8,
    "--logging_steps": 1,
    "--save_strategy": "no",
    "--gradient_checkpointing": False,
}


def as_prompts(dataset: Dataset) -> Dataset:
    """Rows with `prompt` (messages) and `instructions` (JSON text).

    Raises:
        ValueError: the columns are of no known kind.
    """
    columns = set(dataset.column_names)
    ifeval = {"prompt", "instruction_id_list", "kwargs"}
    if not (ifeval <= columns or {"prompt", "instructions"} <= columns):
        raise ValueError(f"Expected 'prompt' and 'instructions', or {sorted(ifeval)}; found {sorted(columns)}.")

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        prompt, rules = row["prompt"], row.get("instructions")
        if "instructions" not in columns:
            pairs = zip(row["instruction_id_list"], row["kwargs"], strict=True)
            rules = [{"id": name, "kwargs": kwargs} for name, kwargs in pairs]
        return {
            "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
            "instructions": rules if isinstance(rules, str) else json.dumps(rules),
        }

    return dataset.map(convert, remove_columns=dataset.column_names, desc="Instructions to prompts")


def load_data(arguments: ScriptArguments) -> Data:
    """Training questions, held-out questions, and the reward function of both.

    Raises:
        ValueError: as many rows are to be held out as there are.
    """
    reward, number = InstructionReward(is_strict=arguments.is_strict), arguments.num_test_questions
    if arguments.dataset_name is None:
        from instruction_tasks import instruction_rows

        rows, label = Dataset.from_list(instruction_rows()), "the instructions of examples/instruction_tasks.py"
    else:
        rows, label = as_prompts(common.load_split(arguments, arguments.dataset_train_split)), arguments.dataset_name
    if arguments.dataset_test_split is not None:
        test = as_prompts(common.load_split(arguments, arguments.dataset_test_split))
        return Data(rows, {common.HELD_OUT: common.head(test, number)}, reward, label)
    train, test = common.hold_out(rows, number)
    return Data(train, {common.HELD_OUT: test}, reward, label)


def parse(arguments: list[str]) -> tuple[ScriptArguments, SDPOConfig, ModelConfig]:
    """The three groups of settings, see `common.parse`."""
    unread = {"dataset_test_split": "in the demo, which holds out questions of its own"}
    return common.parse(ScriptArguments, arguments, demo=DEMO_DEFAULTS, only_with_dataset=unread)


def main(arguments: list[str], *, on_trainer: Callable[[SDPOTrainer], None] | None = None) -> None:
    """The whole script. `on_trainer` is called with the trainer once it is built, for measurements."""
    script, config, model_arguments = parse(arguments)
    common.print_gains(common.run(script, config, model_arguments, load_data(script), on_trainer=on_trainer))


if __name__ == "__main__":
    main(sys.argv[1:])
