"""A step whose loss or gradient is not finite ends the run before it is made.

What stays: the weights of before it as a checkpoint that is resumed as if the step had not begun, and the rows at
fault in a file. Every rank ends with the same error.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from sdpo import distributed
from sdpo.checkpoint import CheckpointedTrainer
from sdpo.sharding import local
from sdpo.tokenization import PromptTokenizer
from sdpo.types import LossTerms, TokenTerms, TrainingBatch

NUM_SHOWN = 3  # rows that the error itself names
NUM_CHARACTERS = 60


class NonFiniteLossError(FloatingPointError):
    """A training step had a loss or a gradient that is NaN or infinite, and was not made.

    step: the number of that step, from 1. rows: of all ranks, as the file has them. rows_file: where they are.
    checkpoint: the folder with the weights of before it, None where none was written.
    """

    def __init__(self, text: str, *, step: int, rows: list[dict[str, Any]], rows_file: Path, checkpoint: Path | None):
        super().__init__(text)
        self.step = step
        self.rows = rows
        self.rows_file = rows_file
        self.checkpoint = checkpoint


class StepStart:
    """What a step changes before the optimizer does, as it was before.

    Nothing is read from the device: accumulators are replaced when they grow, so their old values are still there.
    """

    def __init__(self, trainer: GuardedTrainer):
        self._device = trainer.accelerator.device
        self._random = (random.getstate(), np.random.get_state(), torch.get_rng_state(), self._of_device())
        self._block = None if trainer.block is None else replace(trainer.block)
        self._earlier = {prompt: list(kept) for prompt, kept in trainer.earlier.by_prompt.items()}
        self._metrics = trainer.metrics["train"].copy()
        self._streaks = Counter(trainer.diagnostics.streaks)
        self._completions = None if trainer.completions is None else trainer.completions.mark()
        self._loss = trainer._tr_loss.clone()

    def _of_device(self) -> Tensor | None:
        return None if self._device.type == "cpu" else torch.get_device_module(self._device).get_rng_state()

    def put_back(self, trainer: GuardedTrainer) -> None:
        """Makes it so again."""
        of_python, of_numpy, of_torch, of_device = self._random
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_device is not None:
            torch.get_device_module(self._device).set_rng_state(of_device)
        trainer.block = self._block
        trainer.earlier.by_prompt = self._earlier
        trainer.metrics["train"] = self._metrics
        trainer.diagnostics.streaks = self._streaks
        if trainer.completions is not None and self._completions is not None:
            trainer.completions.return_to(self._completions)
        trainer._tr_loss = self._loss
        trainer.model_wrapped.zero_grad()


class GuardedTrainer(CheckpointedTrainer):
    """A `Trainer` that makes no step whose loss or gradient is not finite.

    The loss of every microbatch is looked at, and the norm of the gradient, both once a step and before the optimizer.
    Not the norm under fp16, where a scaler of gradients skips such a step and goes on by itself. DeepSpeed makes the
    step within the backward pass, so there the losses are looked at before the last one, and the norm is left to it.
    """

    tokenizer: PromptTokenizer  # made by the subclass

    _start: StepStart
    # Of each microbatch of the step: its loss, which of its rows have values that are not finite, and the rows.
    _seen: list[tuple[Tensor, Tensor, Sequence[Mapping[str, Any]]]]

    def begin_step(self) -> None:
        """To be called before anything of the step is drawn or counted."""
        self._start, self._seen = StepStart(self), []

    def observe(self, loss: LossTerms, terms: TokenTerms, batch: TrainingBatch) -> None:
        """Takes what was computed of a microbatch, before its backward pass."""
        grids = [grid for grid in (terms.logps, terms.divergence) if grid is not None]
        is_bad = torch.stack([~grid.detach().isfinite().all(dim=1) for grid in grids]).any(dim=0)
        self._seen.append((loss.loss.detach(), is_bad, batch.rows))
        if self._steps_in_backward and self.accelerator.sync_gradients:
            self._end_unless_finite(None)

    @property
    def _steps_in_backward(self) -> bool:
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not self._steps_in_backward:
            self._end_unless_finite(norm if self.accelerator.scaler is None else None)
        return norm

    def _end_unless_finite(self, norm: Any) -> None:
        values = [loss for loss, _, _ in self._seen]
        if norm is not None:  # of a model in pieces the norm of this rank's; all ranks' are asked below
            values.append(local(torch.as_tensor(norm)))
        finite = torch.stack([value.to(self.accelerator.device).float().isfinite() for value in values])
        if distributed.any_rank(~finite.all(), self.accelerator):
            raise self._error()

    def _error(self) -> NonFiniteLossError:
        """Writes what stays, and says what happened. On every rank."""
        losses = distributed.gather_values([loss.item() for loss, _, _ in self._seen], self.accelerator)
        is_loss = not all(np.isfinite(losses_of_rank).all() for losses_of_rank in losses)
        rows, _ = distributed.gather_rows(self._rows_at_fault(is_loss), self.accelerator)
        step, what = self.state.global_step + 1, "loss" if is_loss else "gradient"
        file = Path(self.args.output_dir) / f"non_finite_step{step}.json"
        # As text, since JSON has no NaN.
        found = {
            "step": step,
            "not_finite": what,
            "losses_by_rank": [list(map(str, of)) for of in losses],
            "rows": rows,
        }
        distributed.from_main(lambda: _write(file, found), self.accelerator)
        self._start.put_back(self)
        checkpoint = self._save_start()
        text = _message(step, what, rows, file, checkpoint, why_none=self._why_none())
        return NonFiniteLossError(text, step=step, rows=rows, rows_file=file, checkpoint=checkpoint)

    def _rows_at_fault(self, is_loss: bool) -> list[dict[str, Any]]:
        """This rank's rows with values that are not finite, or whose microbatch has such a loss; else the step's."""
        found = []
        decode = self.tokenizer.tokenizer.decode
        for number, (loss, is_bad, rows) in enumerate(self._seen):
            if is_loss and loss.isfinite():
                continue
            flags = is_bad.tolist() if is_loss and is_bad.any() else [True] * len(rows)
            found += [
                {
                    "rank": self.accelerator.process_index,
                    "microbatch": number,
                    "row": index,
                    "prompt": decode(row["prompt_ids"]),
                    "completion": decode(row["completion_ids"]),
                    "teacher_prompt": decode(row["teacher_prompt_ids"]),
                    "reward": row["reward"],
                    "feedback": row["feedback"],
                }
                for index, (row, at_fault) in enumerate(zip(rows, flags, strict=True))
                if at_fault
            ]
        return found

    def _why_none(self) -> str | None:
        """Why no checkpoint is written; None where one is."""
        if self.state.global_step == 0:
            return "No step was made before it: the weights are those that the run was given."
        if self.args.save_strategy == SaveStrategy.NO:
            return (
                "With save_strategy='no' no checkpoint is written; trainer.model has the weights of before the step."
            )
        return None

    def _save_start(self) -> Path | None:
        """The checkpoint of before the step. No older one goes for it: weights that are spoilt are often so before."""
        if self._why_none() is not None:
            return None
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            self._save_checkpoint(self.model, None)
        finally:
            self.args.save_total_limit = limit
        return Path(self._get_output_dir(None)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"


def _write(file: Path, found: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=2), encoding="utf-8")


def _message(
    step: int, what: str, rows: Sequence[dict[str, Any]], file: Path, checkpoint: Path | None, *, why_none: str | None
) -> str:
    shown = [f"rank {row['rank']}: {_short(row['prompt'])!r} -> {_short(row['completion'])!r}" for row in rows]
    more = f" and {len(rows) - NUM_SHOWN} more" if len(rows) > NUM_SHOWN else ""
    kept = (
        f"The weights of before it are in {checkpoint}; resuming from there makes the same step again, so change what "
        "is to blame first."
    )
    return (
        f"The {what} of step {step} is not finite, so the step was not made. Its rows, {len(rows)} of all ranks, are "
        f"in {file}: {'; '.join(shown[:NUM_SHOWN]) or 'none'}{more}. {kept if checkpoint else why_none} What to try: "
        "where the rows look ordinary, an update before this has spoilt the weights: resume from an earlier "
        "checkpoint with a lower learning_rate or max_grad_norm. With fp16=True set bf16=True instead. Where a row is "
        "strange (empty, very long, a huge reward), mend or leave out what it comes from."
    )


def _short(text: str) -> str:
    return text if len(text) <= NUM_CHARACTERS else f"{text[:NUM_CHARACTERS]}..."
