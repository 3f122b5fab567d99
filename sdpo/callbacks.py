"""Hooks a callback may define, and warnings about runs that cannot learn."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.utils import logging

from sdpo import health
from sdpo.collate import join_logps, teacher_context_tensors
from sdpo.metrics import Metrics, count_distilled, observe_rewards, observe_rows
from sdpo.reprompt import context_metrics
from sdpo.teacher import Teacher
from sdpo.types import Phase, RepromptSettings, Row, ScoredRollout, TeacherContext, TrainingBatch

logger = logging.get_logger(__name__)


# What each hook is given, besides args, state, control, model and processing_class.
HOOKS: dict[str, tuple[str, ...]] = {
    "on_generation_batch_built": ("generate_every", "steps_per_generation"),
    "on_teacher_context_built": (
        "teacher_input_ids",
        "teacher_attention_mask",
        "completion_mask",
        "self_distillation_mask",
    ),
    "on_self_distillation_batch_prepared": (
        "prompt_ids",
        "completion_ids",
        "old_per_token_logps",
        "teacher_input_ids",
        "teacher_attention_mask",
        "self_distillation_mask",
    ),
}


class SDPOCallback(TrainerCallback):
    """A `TrainerCallback` with the events of a generation block. Any callback may define these methods.

    Each also receives `model` and `processing_class` as keywords. Tensors are on the CPU.
    """

    def on_generation_batch_built(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        *,
        generate_every: int,
        steps_per_generation: int,
        **kwargs: Any,
    ) -> None:
        """A new block is ready; it serves `generate_every` microbatches, in `steps_per_generation` different ones."""

    def on_teacher_context_built(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        *,
        teacher_input_ids: Tensor,
        teacher_attention_mask: Tensor,
        completion_mask: Tensor,
        self_distillation_mask: Tensor,
        **kwargs: Any,
    ) -> None:
        """The teacher's prompts are written.

        teacher_input_ids, teacher_attention_mask (B, Q + T): prompt padded on the left, completion on the right;
        completion_mask (B, T); self_distillation_mask (B,), 1 where the teacher knows more than the student.
        """

    def on_self_distillation_batch_prepared(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        *,
        prompt_ids: Tensor,
        completion_ids: Tensor,
        old_per_token_logps: Tensor | None,
        teacher_input_ids: Tensor,
        teacher_attention_mask: Tensor,
        self_distillation_mask: Tensor,
        **kwargs: Any,
    ) -> None:
        """The block is about to be trained on.

        prompt_ids (B, P) padded on the left; completion_ids (B, T); old_per_token_logps (B, T) in nats, None where the
        block is used within one optimizer step.
        """


def call_hooks(
    trainer: Trainer, phase: Phase, rows: Sequence[Row], batches: Sequence[TrainingBatch], *, pad_token_id: int
) -> None:
    """Calls the hooks that the trainer's callbacks define, in the order of a block's stages.

    The payload is made only where somebody looks at it.
    """
    events = ["on_teacher_context_built", "on_self_distillation_batch_prepared"]
    events += ["on_generation_batch_built"] if phase == "train" else []
    callbacks = trainer.callback_handler.callbacks
    calls = [(event, method) for event in events for c in callbacks if (method := getattr(c, event, None)) is not None]
    values = _payload(trainer.args, rows, batches, pad_token_id=pad_token_id) if calls else {}
    for event, method in calls:
        method(
            args=trainer.args,
            state=trainer.state,
            control=trainer.control,
            model=trainer.model,
            processing_class=trainer.processing_class,
            **{name: values[name] for name in HOOKS[event]},
        )


def _payload(args: Any, rows: Sequence[Row], batches: Sequence[TrainingBatch], *, pad_token_id: int) -> dict[str, Any]:
    return {
        **teacher_context_tensors(rows, pad_token_id=pad_token_id),
        "old_per_token_logps": join_logps([batch.old_logps for batch in batches]),
        "generate_every": args.steps_per_generation * args.num_iterations,
        "steps_per_generation": args.steps_per_generation,
    }


class TeacherUpdate(TrainerCallback):
    """Lets the teacher follow the student after every optimizer step."""

    def __init__(self, teacher: Teacher):
        self.teacher = teacher

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.teacher.update(state.global_step)


_MESSAGES = {
    "flat_rewards": (
        "All rewards of every group are equal, so all advantages are zero. Check the reward functions, or take "
        "questions of which the model solves some."
    ),
    "no_success": (
        "No completion reached success_reward_threshold={threshold}. If this goes on, take easier questions, "
        "lower the threshold, or return feedback and set include_environment_feedback=True."
    ),
    "inactive": (
        "Self-distillation trains on nothing: no completion has a teacher context (a successful sibling or feedback) "
        "that fits in max_reprompt_len, or those that have one are truncated and masked."
    ),
    "not_finite": (
        "Not finite at step {step}, or since the log before it: {names}. The loss of a training step is not meant, "
        "since it would have ended the run. If this was an evaluation, an update before it has spoilt the weights, or "
        "16 bits are too few: evaluate an earlier checkpoint, or set bf16=True instead of fp16=True."
    ),
    "long_prompts": (
        "{num_cut} of {num_prompts} prompts of a block are longer than max_prompt_length={limit} tokens and were cut "
        "from the left; the metric prompts/truncated_fraction counts them."
    ),
    "unused_feedback": (
        "There is feedback about the attempts (from a reward function or the column privileged_context), but "
        "include_environment_feedback=False keeps it from the teacher. Set it to True to use it."
    ),
}


class KeepGenerationConfig(TrainerCallback):
    """Leaves the model's generation config as the user gave it; `Trainer` writes the tokenizer's tokens into it."""

    def __init__(self, model: Any):
        self.given = copy.deepcopy(model.generation_config)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        kwargs["model"].generation_config = self.given


class HealthWarnings(TrainerCallback):
    """Warns of what `sdpo.health` finds in the logs, each fault once a run, on the main process.

    A run that is resumed goes on with the history of its checkpoint. `trainer.remove_callback(HealthWarnings)` takes
    it out.
    """

    def __init__(self) -> None:
        self.windows = health.Windows()
        self.told: set[str] = set()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.windows = health.Windows()
        for log in state.log_history:
            self._add(log)
        self.told = set(health.findings(self.windows.history))  # by the run that wrote the checkpoint

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not self._add(state.log_history[-1]):
            return
        for name, message in health.findings(self.windows.history).items():
            if name not in self.told:
                self.told.add(name)
                logger.warning("%s (told once, at step %d)", message, state.global_step)

    def _add(self, log: dict[str, Any]) -> bool:
        """Takes in a log of training, not of an evaluation or the end; true where a window is complete."""
        return "loss" in log and self.windows.add(log)


class Diagnostics:
    """Warnings of one run: some once; about degenerate steps at the first of a streak and every `interval`-th."""

    def __init__(self, *, interval: int, tolerance: float, threshold: float):
        self.interval = interval
        self.tolerance = tolerance
        self.threshold = threshold
        self.streaks: Counter[tuple[Phase, str]] = Counter()
        self.told: set[str] = set()

    def tell_once(self, name: str, **values: object) -> None:
        """Warns at the first time this run comes across `name`, whatever the values are later."""
        if name not in self.told:
            self.told.add(name)
            logger.warning("%s", _MESSAGES[name].format(**values))

    def observe(self, phase: Phase, **is_degenerate: bool) -> None:
        """Counts the streaks of this block's conditions and warns where it is time."""
        for name, holds in is_degenerate.items():
            key = (phase, name)
            self.streaks[key] = self.streaks[key] + 1 if holds else 0
            streak = self.streaks[key]
            if holds and self.interval and (streak == 1 or streak % self.interval == 0):
                message = _MESSAGES[name].format(threshold=self.threshold)
                logger.warning("%s (%d in a row, %s)", message, streak, phase)


def observe_block(
    metrics: Metrics,
    diagnostics: Diagnostics,
    phase: Phase,
    world: Sequence[ScoredRollout],
    contexts: Sequence[TeacherContext],
    rows: Sequence[Row],
    *,
    args: Any,
    shown: RepromptSettings,
) -> None:
    """Adds the metrics of a block, and warns where it cannot teach.

    `world`, `contexts`: of all ranks' rows; `rows`: of this rank's.
    """
    is_flat = observe_rewards(metrics, world, tolerance=diagnostics.tolerance)
    observe_rows(metrics, rows)
    found = context_metrics(world, contexts, shown)
    metrics.add_all(found)
    num_distilled = count_distilled(world, contexts, masks_truncated=args.mask_truncated_completions)
    is_distilling = args.distillation_weight > 0
    if is_distilling and not args.include_environment_feedback and any(row.feedback for row in world):
        diagnostics.tell_once("unused_feedback")
    diagnostics.observe(
        phase,
        flat_rewards=is_flat and args.distillation_weight < 1,
        no_success=is_distilling
        and args.use_successful_as_teacher
        and found["self_distillation/success_group_fraction"][0] == 0,
        inactive=is_distilling and num_distilled <= diagnostics.tolerance * len(world),
    )
