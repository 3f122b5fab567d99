"""Is the teacher better than the student? Measured before a run, since it decides whether the run can help.

The teacher of step 0 is the student with another prompt. So its accuracy is that of answers which the student itself
samples when it is shown a demonstration, the feedback, or both (the paper compares the same in its Table 6).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from sdpo import distributed
from sdpo.data import select_columns
from sdpo.demonstrations import is_success
from sdpo.reprompt import build_teacher_contexts, fit_teacher_prompt
from sdpo.types import Prompt, RepromptSettings, Rollout, ScoredRollout, TeacherContext

if TYPE_CHECKING:
    from sdpo.trainer import SDPOTrainer

logger = logging.get_logger(__name__)

KINDS = {"demonstration": (True, False), "feedback": (False, True), "both": (True, True)}
RUN = "as in the run"
Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over questions and its standard error, the questions being independent (answers to one are not)."""

    mean: float
    standard_error: float
    num_questions: int

    @classmethod
    def of(cls, by_question: Sequence[float]) -> Estimate:
        number = len(by_question)
        mean = sum(by_question) / number if number else math.nan
        if number < 2:
            return cls(mean, math.nan, number)
        variance = sum((value - mean) ** 2 for value in by_question) / (number - 1)
        return cls(mean, math.sqrt(variance / number), number)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval, normal approximation."""
        return self.mean - Z95 * self.standard_error, self.mean + Z95 * self.standard_error

    def __str__(self) -> str:
        return f"{self.mean:.3f} +- {Z95 * self.standard_error:.3f}"


@dataclass(frozen=True, slots=True)
class TeacherAccuracy:
    """Accuracy of one kind of teacher, that of the student on the same questions, and the difference of the two."""

    teacher: Estimate
    student: Estimate
    gain: Estimate


@dataclass(frozen=True, slots=True)
class TeacherComparison:
    """What `compare_teacher` found.

    `student`: share of successful answers. `mixed_groups`: share of questions with both a success and a failure among
    the answers. `run`: the teacher as the run's settings make it, over all answers that it would teach, beside a
    second sample of the student's on the same questions. `by_context`: for "demonstration", "feedback" and "both", the
    teacher shown that and nothing else. None where no answer had such a context.
    """

    student: Estimate
    mixed_groups: Estimate
    run: TeacherAccuracy | None
    by_context: dict[str, TeacherAccuracy | None] = field(default_factory=dict)

    @property
    def is_teacher_better(self) -> bool:
        """Whether the teacher that the run will use beats the student by more than chance (95 %)."""
        return self.run is not None and self.run.gain.interval[0] > 0

    def __str__(self) -> str:
        lines = [
            f"student                      {self.student}   ({self.student.num_questions} questions)",
            f"groups with both outcomes    {self.mixed_groups}",
        ]
        for kind, found in {RUN: self.run, **self.by_context}.items():
            name = f"teacher, {kind}"
            if found is None:
                lines.append(f"{name:<28} no answer had this context")
                continue
            lines.append(
                f"{name:<28} {found.teacher}   student on the same questions {found.student.mean:.3f}, "
                f"gain {found.gain}"
            )
        return "\n".join([*lines, "intervals are 95 %"])


def compare_teacher(trainer: SDPOTrainer, *, dataset: Any = None, num_prompts: int = 32) -> TeacherComparison:
    """Accuracy of the student and of its own teacher on the first `num_prompts` rows, before training.

    Samples `num_generations` answers a question from the student twice, and for each answer of the first sample that
    has a context one from the teacher. That sample also decides which questions are compared (those with a success,
    say), where it would flatter the student; so the student's part of a comparison is the second one. Success is
    `success_reward_threshold`, as in training. The random state of the run is left as it was.
    Several processes share out the questions, and all of them get the same answer; to be called on every one.
    Warns where the teacher is not clearly better: a teacher that answers worse pulls the student down.

    Raises:
        ValueError: there is no dataset, or it is empty.
    """
    dataset = trainer.train_dataset if dataset is None else dataset
    rows = list(islice(iter(dataset), num_prompts)) if dataset is not None else []
    if not rows:
        raise ValueError("compare_teacher needs a dataset with at least one row; pass dataset=...")
    rank, world_size = trainer.args.process_index, trainer.args.world_size
    rows = rows[len(rows) * rank // world_size : len(rows) * (rank + 1) // world_size]
    rows = [select_columns(row, trainer.columns) for row in rows]
    examples = [row for row in rows for _ in range(trainer.args.num_generations)]
    settings = trainer.reprompt
    with torch.random.fork_rng():
        attempts = trainer.score(trainer.roll_out(examples, "train"), examples)
        again = trainer.score(trainer.roll_out(examples, "train"), examples)
        compare = partial(_teacher_accuracy, trainer, attempts, examples, _accuracy_by_question(trainer, again))
        run = compare(settings, lambda context: context.is_informative)
        by_context = {}
        for kind, flags in KINDS.items():
            shown = replace(
                settings,
                use_successful_as_teacher=flags[0],
                demonstration_column=settings.demonstration_column if flags[0] else None,
                include_environment_feedback=flags[1],
                environment_feedback_only_without_solution=False,
            )
            is_runs = shown == settings and kind != "both"
            by_context[kind] = run if is_runs else compare(shown, partial(_shows, flags))
    student = _by_question(trainer, attempts)
    comparison = TeacherComparison(
        student=Estimate.of([sum(s) / len(s) for s in student.values()]),
        mixed_groups=Estimate.of([float(0 < sum(s) < len(s)) for s in student.values()]),
        run=run,
        by_context=by_context,
    )
    _warn(comparison)
    return comparison


def _shows(flags: tuple[bool, bool], context: TeacherContext) -> bool:
    """Whether a context holds a demonstration and feedback exactly where `flags` say so."""
    return (bool(context.demonstration_text), bool(context.feedback)) == flags


def _by_question(trainer: SDPOTrainer, rows: Sequence[ScoredRollout]) -> dict[int, list[bool]]:
    """Successes of all ranks' rows by question, each question being one rank's."""
    found: dict[int, list[bool]] = defaultdict(list)
    for row in rows:
        found[row.rollout.group].append(is_success(row, trainer.reprompt))
    by_rank = distributed.gather_values(dict(found), trainer.accelerator)
    return {group: successes for of_rank in by_rank for group, successes in of_rank.items()}


def _accuracy_by_question(trainer: SDPOTrainer, rows: Sequence[ScoredRollout]) -> dict[int, float]:
    return {group: sum(s) / len(s) for group, s in _by_question(trainer, rows).items()}


def _teacher_accuracy(
    trainer: SDPOTrainer,
    attempts: Sequence[ScoredRollout],
    examples: Sequence[Any],
    student: Mapping[int, float],
    settings: RepromptSettings,
    is_wanted: Callable[[TeacherContext], bool],
) -> TeacherAccuracy | None:
    """The teacher that these settings make, on the attempts whose context, once it fits, is wanted.

    `student`: its accuracy by question, of answers that did not choose the questions.
    """
    with distributed.together(trainer.accelerator):
        taught = _taught(trainer, attempts, settings, is_wanted)
        chosen, prompt_ids = [i for i, _ in taught], trainer.tokenizer.encode([prompt for _, prompt in taught])
    completions, texts = trainer.sample(prompt_ids)
    answers = [
        Rollout(attempts[i].rollout.group, attempts[i].rollout.prompt, ids, completion, text)
        for i, ids, completion, text in zip(chosen, prompt_ids, completions, texts, strict=True)
    ]
    teacher = _accuracy_by_question(trainer, trainer.score(answers, [examples[i] for i in chosen]))
    if not teacher:
        return None
    return TeacherAccuracy(
        teacher=Estimate.of(list(teacher.values())),
        student=Estimate.of([student[group] for group in teacher]),
        gain=Estimate.of([teacher[group] - student[group] for group in teacher]),
    )


def _taught(
    trainer: SDPOTrainer,
    attempts: Sequence[ScoredRollout],
    settings: RepromptSettings,
    is_wanted: Callable[[TeacherContext], bool],
) -> list[tuple[int, Prompt]]:
    """(index, the teacher's prompt) of each attempt whose context, once it fits, is wanted."""
    found = []
    for i, context in enumerate(build_teacher_contexts(attempts, settings)):
        if context.is_informative:
            prompt, fitted, _ = fit_teacher_prompt(
                attempts[i].rollout.prompt,
                context,
                settings,
                count_tokens=lambda p: len(trainer.tokenizer.encode([p])[0]),
            )
            if is_wanted(fitted):
                found.append((i, prompt))
    return found


def _warn(comparison: TeacherComparison) -> None:
    if comparison.run is None:
        logger.warning(
            "No answer had a context that this run would show its teacher: self-distillation has nothing to learn "
            "from. Take easier questions, more generations, or return feedback."
        )
    elif not comparison.is_teacher_better:
        logger.warning(
            "The teacher is not clearly better than the student on the same questions: %s against %s. "
            "Self-distillation pulls the student towards the teacher; try other templates or feedback, a larger "
            "model, or a smaller distillation_weight.",
            comparison.run.teacher,
            comparison.run.student,
        )
