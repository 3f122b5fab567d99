"""Trains a model on questions with choices by self-distillation: the teacher is shown a sibling that chose right.

    python examples/sdpo_mcq.py                                    # the demo: a small embedded model, simple facts
    python examples/sdpo_mcq.py --model_name_or_path Qwen/Qwen3-8B --dataset_name allenai/ai2_arc \
        --dataset_config ARC-Challenge --preset no_feedback --output_dir outputs/sdpo-mcq

Read are data sets with a question (`question`), choices (`choices`: texts, or a dict of `text` and `label`; or
`options`) and the right one (`answer` or `answerKey`: a letter, an index from 0, or the text), as ARC, MMLU and
MMLU-Pro have them; one with a `prompt` besides is used unchanged. Settings are fields of this script's arguments, of
`sdpo.SDPOConfig` and of `trl.ModelConfig`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import common
from common import CommonArguments, Data
from datasets import Dataset
from trl import ModelConfig

from sdpo import SDPOConfig, SDPOTrainer
from sdpo.rewards import MultipleChoiceReward

INSTRUCTION = 'Reason step by step and end with "The answer is (X)", X being the letter of the right choice.'
LETTERS = "ABCDEFGHIJ"
COLUMNS = {
    "question": ("prompt", "question"),
    "choices": ("choices", "options"),
    "answer": ("answerKey", "answer_index", "answer"),
}
"""Names of columns that are looked for, in this order."""


@dataclass
class ScriptArguments(CommonArguments):
    """The other recipes' arguments; this one has no more."""


# What a bare `python examples/sdpo_mcq.py` runs.
DEMO_DEFAULTS: dict[str, Any] = {
    "--output_dir": "outputs/mcq",
    "--check_teacher": True,
    "--num_test_questions": 30,
    "--num_test_samples": 8,
    "--reprompt_template": "{prompt}{solution}{feedback}",
    "--solution_template": "\n\n{successful_previous_attempt}",
    "--distillation_weight": 0.5,
    "--distillation_mode": "topk_logits",
    "--distillation_topk": 20,
    "--distillation_alpha": 0.5,
    "--max_completion_length": 12,
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


def texts_of(choices: Any) -> list[str]:
    """Texts of the choices, which are a list of them or a dict that holds the list."""
    return list(choices["text"] if isinstance(choices, Mapping) else choices)


def letter_of(answer: Any, choices: Any) -> str:
    """The letter of the right choice, counted from A in the order of the choices.

    Labels of the data set's own ("1" to "4" in some rows of ARC) are read where the choices have them.

    Raises:
        ValueError: the answer is none of the choices.
    """
    texts = texts_of(choices)
    labels = list(choices["label"]) if isinstance(choices, Mapping) and "label" in choices else list(LETTERS)
    if isinstance(answer, int) and 0 <= answer < len(texts):
        return LETTERS[answer]
    for names in (labels[: len(texts)], texts):
        if answer in names:
            return LETTERS[names.index(answer)]
    raise ValueError(f"The answer {answer!r} is none of the choices {texts}.")


def as_prompts(dataset: Dataset) -> Dataset:
    """Rows with `prompt` (messages), `choices` (texts) and `answer` (a letter).

    Raises:
        ValueError: the columns are of no known kind, or a row has more than ten choices.
    """
    columns = set(dataset.column_names)
    found = {part: next((name for name in names if name in columns), None) for part, names in COLUMNS.items()}
    if None in found.values():
        raise ValueError(f"Expected a column for each part of {COLUMNS}; found {sorted(columns)}.")

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        texts = texts_of(row[found["choices"]])
        if len(texts) > len(LETTERS):
            raise ValueError(f"A question has {len(texts)} choices, and at most {len(LETTERS)} are read: {texts}.")
        new = {"choices": texts, "answer": letter_of(row[found["answer"]], row[found["choices"]])}
        if "prompt" in row:
            return {"prompt": row["prompt"], **new}
        lines = [row[found["question"]], *(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False))]
        return {"prompt": [{"role": "user", "content": "\n".join(lines) + f"\n\n{INSTRUCTION}"}], **new}

    return dataset.map(convert, remove_columns=dataset.column_names, desc="Questions to prompts")


def load_data(arguments: ScriptArguments) -> Data:
    """Training questions, held-out questions, and the reward function of both."""
    reward, number = MultipleChoiceReward(), arguments.num_test_questions
    if arguments.dataset_name is None:
        from choice_tasks import choice_rows

        train, test = common.hold_out(Dataset.from_list(choice_rows()), number)
        return Data(train, {common.HELD_OUT: test}, reward, "the questions of examples/choice_tasks.py")
    train = as_prompts(common.load_split(arguments, arguments.dataset_train_split))
    test = as_prompts(common.head(common.load_split(arguments, arguments.dataset_test_split), number))
    return Data(train, {common.HELD_OUT: test}, reward, arguments.dataset_name)


def parse(arguments: list[str]) -> tuple[ScriptArguments, SDPOConfig, ModelConfig]:
    """The three groups of settings, see `common.parse`."""
    return common.parse(ScriptArguments, arguments, demo=DEMO_DEFAULTS)


def main(arguments: list[str], *, on_trainer: Callable[[SDPOTrainer], None] | None = None) -> None:
    """The whole script. `on_trainer` is called with the trainer once it is built, for measurements."""
    script, config, model_arguments = parse(arguments)
    common.print_gains(common.run(script, config, model_arguments, load_data(script), on_trainer=on_trainer))


if __name__ == "__main__":
    main(sys.argv[1:])
