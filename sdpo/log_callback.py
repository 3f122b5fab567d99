"""When a completion is logged, and who is told: files, the terminal, the trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from sdpo import completion_log, distributed
from sdpo.completion_log import CompletionRecord, TokenValues, writable
from sdpo.demonstrations import is_success
from sdpo.token_texts import TokenTexts
from sdpo.tokenization import PromptTokenizer
from sdpo.types import RepromptSettings, Row, TokenTerms, TrainingBatch

NUM_ALTERNATIVES = 5
WIDTH = 160  # columns of a table that goes into a file, where there is no terminal to ask


class CompletionLog(TrainerCallback):
    """Logs every completion once, with the step that trains on it first and what that step computed of its tokens.

    A block may outlive the step that it was sampled in, and be used several times. So the rows of a microbatch wait,
    under the microbatch's number, until it is trained on; later uses find nothing waiting. Values stay on the device
    until the step is over, so that nothing waits for it in between.
    """

    def __init__(self, trainer: Trainer, tokenizer: PromptTokenizer, reprompt: RepromptSettings):
        self._accelerator = trainer.accelerator
        self._handler = trainer.callback_handler
        self._texts = TokenTexts(tokenizer.tokenizer)
        self._reprompt = reprompt
        self._waiting: dict[int, list[CompletionRecord]] = {}
        self._trained: list[tuple[list[CompletionRecord], TokenTerms]] = []
        self._num_microbatches = self._num_blocks = 0
        self._is_training = False

    # --- from the trainer --------------------------------------------------------------------------------------------

    def remember(self, rows: Sequence[Row], batches: Sequence[TrainingBatch]) -> list[TrainingBatch]:
        """The microbatches of a new block with their numbers. `rows` are theirs, in order."""
        start, taken, numbered = distributed.first_row(len(rows), self._accelerator), 0, []
        with distributed.together(self._accelerator):
            for batch in batches:
                masks = zip(batch.distillation_mask.any(dim=1), batch.policy_mask.any(dim=1), strict=True)
                self._waiting[self._num_microbatches] = [
                    self._record(rows[taken + i], start + taken + i, is_distilled=bool(one), is_in_policy=bool(other))
                    for i, (one, other) in enumerate(masks)
                ]
                numbered.append(replace(batch, number=self._num_microbatches))
                taken += len(self._waiting[self._num_microbatches])
                self._num_microbatches += 1
        self._num_blocks += 1
        return numbered

    def num_alternatives(self, batch: TrainingBatch) -> int:
        """How many likeliest tokens are to be found for this microbatch: none where it is not logged at this use."""
        return NUM_ALTERNATIVES if batch.number in self._waiting else 0

    def observe(self, batch: TrainingBatch, terms: TokenTerms) -> None:
        """Takes what was computed of a microbatch, at its first use."""
        if batch.number in self._waiting:
            self._trained.append((self._waiting.pop(batch.number), terms))

    def forget(self) -> None:
        """Drops what waits; a new run begins."""
        self._waiting.clear()
        self._trained.clear()
        self._num_microbatches = self._num_blocks = 0

    def mark(self) -> tuple[dict[int, list[CompletionRecord]], int, int]:
        """What waits now, for `return_to`."""
        return dict(self._waiting), self._num_microbatches, self._num_blocks

    def return_to(self, mark: tuple[dict[int, list[CompletionRecord]], int, int]) -> None:
        """Makes it as it was at the mark; the step since then is not made."""
        self._waiting, self._num_microbatches, self._num_blocks = mark
        self._trained.clear()

    def state_dict(self) -> dict[str, Any]:
        """What waits, as plain values, for a run that goes on in the middle of a block."""
        waiting = {number: [asdict(record) for record in records] for number, records in self._waiting.items()}
        return {"waiting": waiting, "num_microbatches": self._num_microbatches, "num_blocks": self._num_blocks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what `state_dict` gave."""
        self._num_microbatches, self._num_blocks = state["num_microbatches"], state["num_blocks"]
        self._waiting = {
            number: [CompletionRecord(**{**record, "values": TokenValues(**record["values"])}) for record in records]
            for number, records in state["waiting"].items()
        }

    # --- events ------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_training = True
        self._on_main(completion_log.begin, _folder(args), step=state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # By the main process alone, since a callback may call `trainer.log` there only.
        if self._is_training and self._accelerator.is_main_process:  # an evaluation may come before any training
            completion_log.append_metrics(_folder(args), state.log_history[-1])

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        with distributed.together(self._accelerator):
            own = [record for records, terms in self._trained for record in self._with_values(records, terms)]
        self._trained.clear()
        records = distributed.gather_to_main(own, self._accelerator)
        self._on_main(self._publish, args, state.global_step, records)

    def _on_main(self, function: Callable[..., object], *arguments: Any, **keywords: Any) -> None:
        """Calls it on the main process; what fails there, a full disk say, ends every process."""

        def call() -> None:
            function(*arguments, **keywords)

        distributed.from_main(call, self._accelerator)

    def _publish(self, args: Any, step: int, records: list[CompletionRecord]) -> None:
        """Writes the file of a step, prints its table, and tells the trackers."""
        if not records:
            return
        records.sort(key=lambda record: (record.block, record.row))
        completion_log.write_completions(_folder(args), step, records)
        number, unique_prompts = args.num_completions_to_print, args.log_unique_prompts
        if number != 0:
            printed = completion_log.chosen(records, number=number, unique_prompts=unique_prompts)
            console = Console()
            table = completion_log.completions_table(step, printed)
            console.print(table, width=None if console.is_terminal else WIDTH)
        reported = completion_log.chosen(records, number=None, unique_prompts=unique_prompts)
        self._report(step, [completion_log.summary_of(step, record) for record in reported])

    # --- records -----------------------------------------------------------------------------------------------------

    def _record(self, row: Row, index: int, *, is_distilled: bool, is_in_policy: bool) -> CompletionRecord:
        scored, context, rollout = row.scored, row.context, row.scored.rollout
        ids = rollout.completion.ids
        return CompletionRecord(
            block=self._num_blocks,
            group=rollout.group,
            row=index,
            prompt=self._texts.decode(rollout.prompt_ids),
            completion=writable(rollout.text),
            token_ids=list(ids),
            token_texts=self._texts.of(ids),
            reward=scored.reward,
            advantage=row.advantage,
            is_success=is_success(scored, self._reprompt),
            feedback=None if scored.feedback is None else writable(scored.feedback),
            teacher_prompt=self._texts.decode(row.teacher_prompt_ids),
            demonstration=context.demonstration,
            demonstration_source=context.source,
            demonstration_text=writable(context.demonstration_text) or None,
            shown_feedback=writable(context.feedback) or None,
            is_distilled=is_distilled,
            is_in_policy=is_in_policy,
            is_prompt_truncated=rollout.is_prompt_truncated,
            is_context_shortened=row.is_context_shortened,
            is_completion_truncated=rollout.completion.is_truncated,
            rewards=dict(scored.rewards),
        )

    def _with_values(self, records: Sequence[CompletionRecord], terms: TokenTerms) -> list[CompletionRecord]:
        """The records of a microbatch with what was computed of their tokens."""
        top = terms.alternatives
        credit = top.credit if terms.credit is None and top is not None else terms.credit
        grids = (terms.logps, terms.entropy, credit, terms.divergence)
        logps, entropy, credits, divergence = (None if grid is None else grid.float().tolist() for grid in grids)
        assert logps is not None and entropy is not None
        found = []
        for i, record in enumerate(records):
            size, values = len(record.token_ids), TokenValues()
            if record.is_distilled or record.is_in_policy:
                values = TokenValues(student_logp=logps[i][:size], entropy=entropy[i][:size])
            if record.is_distilled and credits is not None and divergence is not None:
                values = replace(values, credit=credits[i][:size], divergence=divergence[i][:size])
            if record.is_distilled and top is not None:
                student, teacher = (
                    self._top(ids[i][:size], logps_of[i][:size])
                    for ids, logps_of in ((top.student_ids, top.student_logps), (top.teacher_ids, top.teacher_logps))
                )
                values = replace(
                    values,
                    student_top=student[0],
                    student_top_prob=student[1],
                    teacher_top=teacher[0],
                    teacher_top_prob=teacher[1],
                )
            found.append(replace(record, values=values))
        return found

    def _top(self, ids: Tensor, logps: Tensor) -> tuple[list[list[str]], list[list[float]]]:
        """Texts and probabilities of the likeliest tokens of T tokens, from (T, K)."""
        return [[self._texts.single(token) for token in row] for row in ids.tolist()], logps.float().exp().tolist()

    # --- trackers ----------------------------------------------------------------------------------------------------

    def _report(self, step: int, summaries: Sequence[dict[str, Any]]) -> None:
        """Hands the completions to the trackers that `report_to` names."""
        columns = list(summaries[0])
        rows = [list(summary.values()) for summary in summaries]
        for callback in self._handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                callback.tb_writer.add_text("completions", completion_log.markdown_table(summaries), step)
            elif isinstance(callback, WandbCallback) and callback._wandb.run is not None:
                table = callback._wandb.Table(columns=columns, data=rows)
                callback._wandb.log({"completions": table, "train/global_step": step})
            elif isinstance(callback, TrackioCallback):
                import pandas as pd  # comes with datasets

                callback._trackio.log({"completions": callback._trackio.Table(dataframe=pd.DataFrame(summaries))})


def _folder(args: Any) -> Path:
    return Path(args.output_dir) / completion_log.FOLDER
