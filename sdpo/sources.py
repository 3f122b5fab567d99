"""What there is to learn from: rewards, and what of the dataset the teacher is shown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from accelerate import Accelerator
from transformers.utils import logging

from sdpo import distributed
from sdpo.config import SDPOConfig
from sdpo.data import check_dataset, columns_to_keep, is_stream, named_datasets
from sdpo.reprompt import with_question
from sdpo.rewards.scorer import FEEDBACK_COLUMN, QUESTION_COLUMN

logger = logging.get_logger(__name__)


def check_data(train: Any, evaluation: Any, reward_funcs: Any, args: SDPOConfig) -> list[list[Any]]:
    """Prompts of each dataset, and the teacher's own forms of them, for the tokenizer to check.

    Raises:
        ValueError: as `check_dataset` and `check_sources`; a `teacher_prompt` that does not fit its prompt.
    """
    found: list[list[Any]] = []
    for name, dataset in named_datasets(train, evaluation):
        column, num_workers = args.demonstration_column, args.dataloader_num_workers
        rows = check_dataset(dataset, name=name, demonstration_column=column, num_workers=num_workers)
        found.append([row["prompt"] for row in rows])
        asked = [row for row in rows if row.get(QUESTION_COLUMN)]
        found.append([with_question(row["prompt"], row[QUESTION_COLUMN]) for row in asked])
    check_sources(reward_funcs, args, has_questions=any(found[1::2]))
    return found


def check_same_data(
    train: Any, evaluation: Any, prompts_by_dataset: Sequence[Sequence[Any]], accelerator: Accelerator
) -> None:
    """Makes sure that all ranks read the same rows, of which each takes a share of its own. On every rank.

    Raises:
        ValueError: they do not: completions of different questions would be taken for those of one.
    """
    if accelerator.num_processes == 1:
        return
    lengths = [None if is_stream(dataset) else len(dataset) for _, dataset in named_datasets(train, evaluation)]
    rows = json.dumps([lengths, prompts_by_dataset], default=lambda value: type(value).__name__)
    found = distributed.gather_values((lengths, hashlib.sha256(rows.encode()).hexdigest()), accelerator)
    if len({digest for _, digest in found}) > 1:
        raise ValueError(
            "The processes were given different datasets: "
            f"their numbers of rows are {[of_rank for of_rank, _ in found]}, and their prompts or the order of them "
            "differ. Every process reads the whole dataset and takes its share of each block, so give all of them the "
            "same one: shuffle it with a fixed seed, and do not split it by rank."
        )


def columns_of_run(reward_functions: Sequence[Callable[..., Any]], args: SDPOConfig) -> list[str] | None:
    """Columns that reach the rewards and the teacher; None for all."""
    for_teacher = [FEEDBACK_COLUMN, QUESTION_COLUMN, *filter(None, [args.demonstration_column])]
    return columns_to_keep(reward_functions, for_teacher=for_teacher, remove_unused=args.remove_unused_columns)


def check_sources(reward_funcs: Any, args: SDPOConfig, *, has_questions: bool) -> None:
    """Makes sure that there is something to learn from; `has_questions`: some row has a `teacher_prompt`.

    Raises:
        ValueError: no reward function, where the run needs rewards; groups of one, where only siblings are shown.
    """
    has_column = has_questions or args.demonstration_column is not None
    has_text = has_column or args.include_environment_feedback
    is_missing = reward_funcs is None or (isinstance(reward_funcs, list | tuple) and not reward_funcs)
    if is_missing and not (has_text and args.distillation_weight == 1):
        raise ValueError(
            "reward_funcs is missing: it decides which completions are successful. Only a run with "
            "distillation_weight=1.0 whose teacher is shown columns of the dataset goes without: privileged_context "
            "(include_environment_feedback=True), demonstration_column, or teacher_prompt."
        )
    if args.distillation_weight == 0 or has_text:
        return
    if not args.use_successful_as_teacher:
        logger.warning(
            "use_successful_as_teacher and include_environment_feedback are both False, and the dataset has nothing "
            "for the teacher (demonstration_column, teacher_prompt): its prompt holds no more than the student's, and "
            "no row is distilled."
        )
    elif args.num_generations == 1 and args.dont_reprompt_on_self_success and not args.demonstration_buffer_size:
        raise ValueError(
            "num_generations=1 leaves the teacher nothing to be shown: there is no other completion to demonstrate, "
            "include_environment_feedback is False, and the dataset has neither demonstration_column nor "
            "teacher_prompt. Set num_generations to 2 or more, include_environment_feedback to True, or "
            "dont_reprompt_on_self_success to False."
        )
