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

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from datasets import Dataset, load_dataset, load_from_disk
from tqdm.auto import tqdm
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from sdpo import SDPOConfig, SDPOTrainer, compare_teacher
from sdpo.data import select_columns
from sdpo.demonstrations import is_success
from sdpo.distributed import gather_rows
from sdpo.rewards import math_reward
from sdpo.teacher_check import Estimate

INSTRUCTION = "Reason step by step and put the final answer in \\boxed{}."


@dataclass
class ScriptArguments:
    """What this script adds to `SDPOConfig` and `ModelConfig`."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub id or local folder of the dataset. The demo makes its own."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split of the held-out questions."})
    feedback_column: str | None = field(
        default=None,
        metadata={"help": "Column whose text the teacher is shown, for example a worked solution; turns feedback on."},
    )
    task: str | None = field(default=None, metadata={"help": "The demo's task, one of examples/demo_tasks.py."})
    num_test_questions: int = field(default=50, metadata={"help": "Held-out questions to measure accuracy on."})
    num_test_samples: int = field(default=4, metadata={"help": "Answers sampled a held-out question."})
    check_teacher: bool = field(
        default=False, metadata={"help": "Before training, compare the teacher's accuracy with the student's."}
    )
    num_check_questions: int = field(default=16, metadata={"help": "Training questions that --check_teacher uses."})


CARD = """\
---
library_name: {library}
base_model: {base_model}
tags:
- sdpo
- reinforcement-learning
---

# {name}

{base_model}, trained with SDPO ([arXiv 2601.20802](https://arxiv.org/abs/2601.20802)) on {dataset}.

| | accuracy of sampled answers to held-out questions | standard error |
|---|---|---|
| before | {accuracy_before[mean]:.3f} | {accuracy_before[standard_error]:.3f} |
| after | {accuracy_after[mean]:.3f} | {accuracy_after[standard_error]:.3f} |

{steps} steps of {rows} completions, {group} a question; distillation weight {weight}, {teacher} teacher. All settings
are in `training_args.bin`, what was logged in `trainer_state.json`.
"""

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
    reward = math_reward if arguments.feedback_column is None else math_reward_alone
    return train, test.select(range(min(len(test), arguments.num_test_questions))), reward


def accuracy(trainer: SDPOTrainer, questions: Dataset, *, num_samples: int) -> Estimate:
    """Share of successful answers, `num_samples` sampled a question as in training; the ranks share the questions."""
    examples = [select_columns(row, trainer.columns) for row in questions for _ in range(num_samples)]
    rank, world_size = trainer.args.process_index, trainer.args.world_size
    size = trainer.args.eval_batch_size * world_size
    successes: list[bool] = []
    starts = range(0, len(examples), size)
    is_quiet = trainer.args.disable_tqdm or not trainer.is_world_process_zero()
    for start in tqdm(starts, desc="Held-out answers", disable=is_quiet, leave=False):
        batch = examples[start : start + size]
        batch = batch[len(batch) * rank // world_size : len(batch) * (rank + 1) // world_size]
        rollouts = trainer.roll_out(batch, "eval")  # on every rank, also for no rows
        scored = trainer.scorer.score(rollouts, batch, trainer_state=trainer.state) if rollouts else []
        found, _ = gather_rows([is_success(row, trainer.args.reprompt) for row in scored], trainer.accelerator)
        successes += found
    return Estimate.of(
        [sum(successes[i : i + num_samples]) / num_samples for i in range(0, len(examples), num_samples)]
    )


def parse(arguments: list[str]) -> tuple[ScriptArguments, SDPOConfig, ModelConfig]:
    """The three groups of settings; those of the demo come first where nothing else is named to run.

    Raises:
        ValueError: a model without a dataset, a dataset without a model, or what only the other of demo and dataset
            reads.
    """
    named = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in arguments if word.startswith("--")}
    is_demo = not named & {"model_name_or_path", "dataset_name", "config"}
    defaults = [str(word) for pair in DEMO_DEFAULTS.items() for word in pair] if is_demo else []
    # An abbreviated name would not be seen above.
    parser = TrlParser((ScriptArguments, SDPOConfig, ModelConfig), allow_abbrev=False)
    script, config, model_arguments = parser.parse_args_and_config([*defaults, *arguments])
    if not is_demo and None in (script.dataset_name, model_arguments.model_name_or_path):
        raise ValueError(
            f"Name both a model and a dataset, got --model_name_or_path {model_arguments.model_name_or_path} and "
            f"--dataset_name {script.dataset_name}. The demo, with a model, a task and templates that fit each other, "
            "runs without both and without --config."
        )
    only = {"task": script.task} if not is_demo else {"feedback_column": script.feedback_column}
    for name, value in only.items():
        if value is not None:
            other = "with a dataset; it names the demo's task" if not is_demo else "in the demo, which has no columns"
            raise ValueError(f"--{name} {value} cannot take effect {other}. Leave it out.")
    return script, config, model_arguments


def model_settings(model_arguments: ModelConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained` that the command line names."""
    settings = {
        "dtype": model_arguments.dtype,
        "attn_implementation": model_arguments.attn_implementation,
        "revision": model_arguments.model_revision,
        "quantization_config": get_quantization_config(model_arguments),
    }
    return {name: value for name, value in settings.items() if value is not None}


def main(arguments: list[str], *, on_trainer: Callable[[SDPOTrainer], None] | None = None) -> None:
    """The whole script. `on_trainer` is called with the trainer once it is built, for measurements."""
    script, config, model_arguments = parse(arguments)
    model = model_arguments.model_name_or_path
    if model is None:
        from demo_model import embedded_model

        model, model_arguments.dtype = embedded_model(), "float32"
    config = replace(config, model_init_kwargs={**model_settings(model_arguments), **(config.model_init_kwargs or {})})
    if script.feedback_column is not None:
        config = replace(config, include_environment_feedback=True)
    train, test, reward = load_data(script)
    trainer = SDPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=train,
        eval_dataset=test if config.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_arguments),
    )
    if on_trainer is not None:
        on_trainer(trainer)
    say = trainer.accelerator.print  # on one rank
    if script.check_teacher:
        say(compare_teacher(trainer, num_prompts=script.num_check_questions), flush=True)
    before = accuracy(trainer, test, num_samples=script.num_test_samples)
    say(f"held-out accuracy before: {before.mean:.3f} (standard error {before.standard_error:.3f})", flush=True)
    trainer.train()
    after = accuracy(trainer, test, num_samples=script.num_test_samples)
    say(f"held-out accuracy after:  {after.mean:.3f} (standard error {after.standard_error:.3f})", flush=True)
    save(trainer, {"accuracy_before": asdict(before), "accuracy_after": asdict(after)}, script, model_arguments)


def save(
    trainer: SDPOTrainer, accuracies: dict[str, Any], script: ScriptArguments, model_arguments: ModelConfig
) -> None:
    """Writes model, tokenizer, metrics and a short model card to the output folder."""
    trainer.save_model()
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    folder = Path(trainer.args.output_dir)
    base_model = model_arguments.model_name_or_path or "SmolLM2-135M-Instruct"
    (folder / "accuracy.json").write_text(json.dumps(accuracies, indent=2))
    args = trainer.args
    card = CARD.format(
        library="peft" if is_peft_model(trainer.model) else "transformers",
        base_model=base_model,
        name=folder.name,
        dataset=script.dataset_name or f"the task {script.task} of examples/demo_tasks.py",
        steps=trainer.state.global_step,
        rows=args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
        group=args.num_generations,
        weight=args.distillation_weight,
        teacher=args.teacher_model_kind,
        **accuracies,
    )
    (folder / "README.md").write_text(card)
    print(f"model, metrics and model card are in {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
