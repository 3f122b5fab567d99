"""What the recipes share: their command line, data by name, accuracy on held-out questions, and what a run leaves.

A recipe has a class of arguments of its own, the settings of its demo, and a function that makes its `Data`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accelerate import PartialState
from accelerate.utils import is_peft_model
from datasets import Dataset, load_dataset, load_from_disk
from tqdm.auto import tqdm
from transformers import HfArgumentParser
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from sdpo import SDPOConfig, SDPOTrainer, compare_teacher
from sdpo.data import select_columns
from sdpo.demonstrations import is_success
from sdpo.distributed import gather_rows
from sdpo.teacher_check import Estimate

Settings = Mapping[str, Any]


@dataclass
class CommonArguments:
    """What the recipes add to `SDPOConfig` and `ModelConfig`."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub id or local folder of the dataset. The demo makes its own."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split of the held-out questions."})
    preset: str | None = field(
        default=None,
        metadata={"help": "Settings of the paper to start from: no_feedback, rich_feedback or test_time."},
    )
    num_test_questions: int = field(default=50, metadata={"help": "Held-out questions to measure accuracy on."})
    num_test_samples: int = field(default=4, metadata={"help": "Answers sampled a held-out question."})
    check_teacher: bool = field(
        default=False, metadata={"help": "Before training, compare the teacher's accuracy with the student's."}
    )
    num_check_questions: int = field(default=16, metadata={"help": "Training questions that --check_teacher uses."})


@dataclass(frozen=True)
class Data:
    """Training questions, sets of questions to measure on by the name they are printed with, and the grader of all.

    The first set of `tests` is the one of the model card. `label`: what the data are, for the card.
    """

    train: Dataset
    tests: dict[str, Dataset]
    reward: Any
    label: str


HELD_OUT = "held-out accuracy"
DEMO_MODEL = "SmolLM2-135M-Instruct"

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

| | {measured} | standard error |
|---|---|---|
| before | {before.mean:.3f} | {before.standard_error:.3f} |
| after | {after.mean:.3f} | {after.standard_error:.3f} |

{steps} steps of {rows} completions, {group} a question; distillation weight {weight}, {teacher} teacher. All settings
are in `training_args.bin`, what was logged in `trainer_state.json`.
"""


# --- the command line ------------------------------------------------------------------------------------------------


def parse(
    script_class: type[Any],
    arguments: list[str],
    *,
    demo: Settings,
    only_in_demo: Mapping[str, str] = MappingProxyType({}),
    only_with_dataset: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Any, SDPOConfig, ModelConfig]:
    """The three groups of settings; those of the demo come first where nothing else is named to run.

    `only_in_demo`, `only_with_dataset`: arguments that the other kind of run does not read, and why.

    Raises:
        ValueError: a model without a dataset, a dataset without a model, or what only the other of demo and dataset
            reads.
    """
    named = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in arguments if word.startswith("--")}
    is_demo = not named & {"model_name_or_path", "dataset_name", "config"}
    words = [*(str(word) for pair in demo.items() for word in pair), *arguments] if is_demo else list(arguments)
    if is_demo and "preset" in named:
        raise ValueError("--preset cannot take effect in the demo, which has settings of its own. Leave it out.")
    if "preset" in named:
        script, config, model_arguments = parse_on_preset(script_class, words)
    else:
        # An abbreviated name would not be seen above.
        parser = TrlParser((script_class, SDPOConfig, ModelConfig), allow_abbrev=False)
        script, config, model_arguments = parser.parse_args_and_config(words)
    if not is_demo and None in (script.dataset_name, model_arguments.model_name_or_path):
        raise ValueError(
            f"Name both a model and a dataset, got --model_name_or_path {model_arguments.model_name_or_path} and "
            f"--dataset_name {script.dataset_name}. The demo, with a model, a task and templates that fit each other, "
            "runs without both and without --config."
        )
    if script.preset is not None and "preset" not in named:
        raise ValueError(f"preset: {script.preset} stands in the file of settings; say --preset {script.preset}.")
    for name, where in (only_with_dataset if is_demo else only_in_demo).items():
        if getattr(script, name) is not None:
            raise ValueError(f"--{name} {getattr(script, name)} cannot take effect {where}. Leave it out.")
    return script, config, model_arguments


def parse_on_preset(script_class: type[Any], words: list[str]) -> tuple[Any, SDPOConfig, ModelConfig]:
    """The three groups of settings, where those that the words do not say are the preset's."""
    parser = TrlParser((script_class, ModelConfig), allow_abbrev=False)
    script, model_arguments, rest = parser.parse_args_and_config(words, return_remaining_strings=True)
    config_parser = HfArgumentParser(SDPOConfig, allow_abbrev=False)
    for action in config_parser._actions:
        action.default = argparse.SUPPRESS  # so that only what the words say is there
    return script, SDPOConfig.preset(script.preset, **vars(config_parser.parse_args(rest))), model_arguments


def model_settings(model_arguments: ModelConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained` that the command line names."""
    settings = {
        "dtype": model_arguments.dtype,
        "attn_implementation": model_arguments.attn_implementation,
        "revision": model_arguments.model_revision,
        "quantization_config": get_quantization_config(model_arguments),
    }
    return {name: value for name, value in settings.items() if value is not None}


# --- data ------------------------------------------------------------------------------------------------------------


def load_split(arguments: CommonArguments, split: str) -> Dataset:
    """One split of the named dataset, from a folder or from the hub."""
    name = arguments.dataset_name
    if os.path.isdir(name) and (Path(name) / "dataset_dict.json").exists():
        return load_from_disk(name)[split]
    return load_dataset(name, arguments.dataset_config, split=split)


def hold_out(dataset: Dataset, number: int) -> tuple[Dataset, Dataset]:
    """All rows but the first `number`, and those.

    Raises:
        ValueError: there are no more rows than that.
    """
    if not 0 < number < len(dataset):
        raise ValueError(f"num_test_questions={number} cannot be held out of {len(dataset)} questions.")
    return dataset.select(range(number, len(dataset))), dataset.select(range(number))


def head(dataset: Dataset, number: int) -> Dataset:
    """The first `number` rows, or all where there are fewer."""
    return dataset.select(range(min(len(dataset), number)))


# --- a run -----------------------------------------------------------------------------------------------------------


def success_rates(trainer: SDPOTrainer, questions: Dataset, *, num_samples: int) -> list[float]:
    """Share of successful answers to each question, `num_samples` sampled as in training, by all ranks together."""
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
        scored = trainer.score(rollouts, batch)
        found, _ = gather_rows([is_success(row, trainer.args.reprompt) for row in scored], trainer.accelerator)
        successes += found
    return [sum(successes[i : i + num_samples]) / num_samples for i in range(0, len(examples), num_samples)]


def gain(before: list[float], after: list[float]) -> Estimate:
    """Mean difference over the same questions: what the questions differ by is not in its standard error."""
    return Estimate.of([b - a for a, b in zip(before, after, strict=True)])


def print_gains(rates: dict[str, tuple[list[float], list[float]]]) -> None:
    """Prints what each test set gained, and by how many standard errors."""
    for name, (before, after) in rates.items():
        found = gain(before, after)
        PartialState().print(
            f"{name} gained {found.mean:+.3f} (standard error {found.standard_error:.3f}, over questions)"
        )


def run(
    script: CommonArguments,
    config: SDPOConfig,
    model_arguments: ModelConfig,
    data: Data,
    *,
    on_trainer: Callable[[SDPOTrainer], None] | None = None,
) -> dict[str, tuple[list[float], list[float]]]:
    """Trains and measures; success rates before and after, by test set and question.

    `on_trainer` is called with the trainer once it is built, for measurements.
    """
    model = model_arguments.model_name_or_path
    if model is None:
        from demo_model import embedded_model

        model, model_arguments.dtype = embedded_model(), "float32"
    config = replace(config, model_init_kwargs={**model_settings(model_arguments), **(config.model_init_kwargs or {})})
    trainer = SDPOTrainer(
        model=model,
        reward_funcs=data.reward,
        args=config,
        train_dataset=data.train,
        eval_dataset=next(iter(data.tests.values())) if config.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_arguments),
    )
    if on_trainer is not None:
        on_trainer(trainer)
    if script.check_teacher:
        trainer.accelerator.print(compare_teacher(trainer, num_prompts=script.num_check_questions), flush=True)
    before = measure(trainer, data, "before:", num_samples=script.num_test_samples)
    trainer.train()
    after = measure(trainer, data, "after: ", num_samples=script.num_test_samples)
    rates = {name: (before[name], after[name]) for name in before}
    save(trainer, rates, data, base_model=model_arguments.model_name_or_path or DEMO_MODEL)
    return rates


def measure(trainer: SDPOTrainer, data: Data, when: str, *, num_samples: int) -> dict[str, list[float]]:
    """Success rates on each test set, whose means are printed."""
    rates = {}
    for name, questions in data.tests.items():
        rates[name] = success_rates(trainer, questions, num_samples=num_samples)
        found = Estimate.of(rates[name])
        text = f"{name} {when} {found.mean:.3f} (standard error {found.standard_error:.3f})"
        trainer.accelerator.print(text, flush=True)  # on one rank
    return rates


def save(
    trainer: SDPOTrainer, rates: dict[str, tuple[list[float], list[float]]], data: Data, *, base_model: str
) -> None:
    """Writes model, tokenizer, metrics and a short model card to the output folder."""
    trainer.save_model()
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    args, folder = trainer.args, Path(trainer.args.output_dir)
    main = next(iter(rates))
    accuracies = {}
    for name, (before, after) in rates.items():
        suffix = "" if name == main else "_" + name.replace(" ", "_")
        found = {"before": before, "after": after}
        accuracies |= {f"accuracy_{when}{suffix}": asdict(Estimate.of(values)) for when, values in found.items()}
    (folder / "accuracy.json").write_text(json.dumps(accuracies, indent=2))
    card = CARD.format(
        library="peft" if is_peft_model(trainer.model) else "transformers",
        base_model=base_model,
        name=folder.name,
        dataset=data.label,
        measured="accuracy of sampled answers to held-out questions" if main == HELD_OUT else main,
        before=Estimate.of(rates[main][0]),
        after=Estimate.of(rates[main][1]),
        steps=trainer.state.global_step,
        rows=args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
        group=args.num_generations,
        weight=args.distillation_weight,
        teacher=args.teacher_model_kind,
    )
    (folder / "README.md").write_text(card)
    print(f"model, metrics and model card are in {folder}")
