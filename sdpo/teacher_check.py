"""Is the teacher better than the student? Measured before a run, since it decides whether the run can help.

The teacher of step 0 is the student with another prompt. So its accuracy is that of answers which the student itself
samples when it is shown a demonstration, the feedback, or both (the paper compares the same in its Table 6).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from sdpo.reprompt import build_teacher_contexts, fit_teacher_prompt, is_success
from sdpo.types import Rollout, ScoredRollout, TeacherContext

if TYPE_CHECKING:
    from sdpo.trainer import SDPOTrainer

logger = logging.get_logger(__name__)

KINDS = {"demonstration": (True, False), "feedback": (False, True), "both": (True, True)}
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
    the answers. `by_context`: for "demonstration", "feedback" and "both", the teacher shown that, None where no answer
    had such a context. `used`: the kind that the run's settings give its teacher.
    """

    student: Estimate
    mixed_groups: Estimate
    used: str
    by_context: dict[str, TeacherAccuracy | None] = field(default_factory=dict)

    @property
    def is_teacher_better(self) -> bool:
        """Whether the teacher that the run will use beats the student by more than chance (95 %)."""
        found = self.by_context.get(self.used)
        return found is not None and found.gain.interval[0] > 0

    def __str__(self) -> str:
        lines = [
            f"student                      {self.student}   ({self.student.num_questions} questions)",
            f"groups with both outcomes    {self.mixed_groups}",
        ]
        for kind, found in self.by_context.items():
            name = f"teacher, {kind}{' *' if kind == self.used else ''}"
            if found is None:
                lines.append(f"{name:<28} no answer had this context")
                continue
            lines.append(
                f"{name:<28} {found.teacher}   student on the same questions {found.student.mean:.3f}, "
                f"gain {found.gain}"
            )
        return "\n".join([*lines, "* what this run's settings show the teacher; intervals are 95 %"])


def compare_teacher(trainer: SDPOTrainer, *, dataset: Any = None, num_prompts: int = 32) -> TeacherComparison:
    """Accuracy of the student and of its own teacher on the first `num_prompts` rows, before training.

    Samples `num_generations` answers a question from the student, and one from the teacher for every answer that has
    the context. Success is `success_reward_threshold`, as in training. The random state of the run is left as it was.
    Warns where the teacher is not clearly better: a teacher that answers worse pulls the student down.

    Raises:
        ValueError: there is no dataset, or it is empty.
    """
    dataset = trainer.train_dataset if dataset is None else dataset
    rows = list(islice(iter(dataset), num_prompts)) if dataset is not None else []
    if not rows:
        raise ValueError("compare_teacher needs a dataset with at least one row; pass dataset=...")
    examples = [row for row in rows for _ in range(trainer.args.num_generations)]
    with torch.random.fork_rng():
        attempts = trainer.scorer.score(trainer.roll_out(examples, "train"), examples, trainer_state=trainer.state)
        by_context = {kind: _teacher_accuracy(trainer, attempts, examples, kind) for kind in KINDS}
    student = _by_question(trainer, attempts)
    comparison = TeacherComparison(
        student=Estimate.of([sum(s) / len(s) for s in student.values()]),
        mixed_groups=Estimate.of([float(0 < sum(s) < len(s)) for s in student.values()]),
        used=_used_kind(trainer, by_context),
        by_context=by_context,
    )
    _warn(comparison)
    return comparison


def _used_kind(trainer: SDPOTrainer, found: Mapping[str, TeacherAccuracy | None]) -> str:
    """What the settings show the teacher: the first kind of those they allow that some answer had."""
    settings = trainer.args.reprompt
    has_demonstration, has_feedback = settings.use_successful_as_teacher, settings.include_environment_feedback
    if settings.environment_feedback_only_without_solution or not (has_demonstration and has_feedback):
        allowed = ["demonstration"] * has_demonstration + ["feedback"] * has_feedback
    else:
        allowed = ["both", "feedback", "demonstration"]
    return next((kind for kind in allowed if found[kind] is not None), (allowed or ["demonstration"])[0])


def _by_question(trainer: SDPOTrainer, rows: Sequence[ScoredRollout]) -> dict[int, list[bool]]:
    found: dict[int, list[bool]] = defaultdict(list)
    for row in rows:
        found[row.rollout.group].append(is_success(row, trainer.args.reprompt))
    return found


def _teacher_accuracy(
    trainer: SDPOTrainer, attempts: Sequence[ScoredRollout], examples: Sequence[Any], kind: str
) -> TeacherAccuracy | None:
    """The teacher shown one kind of context, on the attempts that have it."""
    shows_demonstration, shows_feedback = KINDS[kind]
    settings = replace(
        trainer.args.reprompt,
        use_successful_as_teacher=shows_demonstration,
        include_environment_feedback=shows_feedback,
        environment_feedback_only_without_solution=False,
    )

    def has_kind(context: TeacherContext) -> bool:
        return bool(context.demonstration_text) == shows_demonstration and bool(context.feedback) == shows_feedback

    contexts = build_teacher_contexts(attempts, settings)
    chosen = [i for i, context in enumerate(contexts) if has_kind(context)]
    if not chosen:
        return None
    prompts = []
    for i in chosen:
        prompt, _, _ = fit_teacher_prompt(
            attempts[i].rollout.prompt,
            contexts[i],
            settings,
            count_tokens=lambda p: len(trainer.tokenizer.encode([p])[0]),
        )
        prompts.append(prompt)
    prompt_ids = trainer.tokenizer.encode(prompts)
    completions = trainer.generator.generate(prompt_ids)
    texts = trainer.tokenizer.decode_batch([completion.ids for completion in completions])
    answers = [
        Rollout(attempts[i].rollout.group, attempts[i].rollout.prompt, ids, completion, text)
        for i, ids, completion, text in zip(chosen, prompt_ids, completions, texts, strict=True)
    ]
    scored = trainer.scorer.score(answers, [examples[i] for i in chosen], trainer_state=trainer.state)
    teacher = {group: sum(s) / len(s) for group, s in _by_question(trainer, scored).items()}
    student = {group: sum(s) / len(s) for group, s in _by_question(trainer, attempts).items() if group in teacher}
    return TeacherAccuracy(
        teacher=Estimate.of(list(teacher.values())),
        student=Estimate.of([student[group] for group in teacher]),
        gain=Estimate.of([teacher[group] - student[group] for group in teacher]),
    )


def _warn(comparison: TeacherComparison) -> None:
    found = comparison.by_context[comparison.used]
    if found is None:
        logger.warning(
            "No answer had the context that this run would show its teacher (%s): self-distillation has nothing to "
            "learn from. Take easier questions, more generations, or return feedback.",
            comparison.used,
        )
    elif not comparison.is_teacher_better:
        logger.warning(
            "The teacher (%s) is not clearly better than the student on the same questions: %s against %s. "
            "Self-distillation pulls the student towards the teacher; try other templates or feedback, a larger "
            "model, or a smaller distillation_weight.",
            comparison.used,
            found.teacher,
            found.student,
        )
