"""A teacher that a server scores: the current policy, on the teacher's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from sdpo.collate import served_grid
from sdpo.types import ServedToken, TrainingBatch


class Scorer(Protocol):
    """A server that holds the policy's weights."""

    def sync(self, step: int) -> None: ...

    def score(
        self,
        sequences: Sequence[tuple[list[int], list[int]]],
        *,
        topk: int,
        support: Sequence[list[list[int]]] | None,
    ) -> list[list[ServedToken]]: ...


def attach_served(
    batches: Sequence[TrainingBatch],
    server: Scorer,
    *,
    step: int,
    topk: int | None,
    support: Sequence[Tensor] | None = None,
) -> list[TrainingBatch]:
    """The microbatches with what the server says of their teacher, under the weights after `step` steps.

    On every rank, also one that has nothing to score. `support`: of each microbatch the ids (B, T, K) that the teacher
    is asked about; None for its own top k.
    """
    server.sync(step)  # also where rollouts are reused: the weights have moved since they were sampled
    places = [(number, row) for number, batch in enumerate(batches) for row in taught_rows(batch)]
    sequences = [sequence_of(batches[number], row) for number, row in places]
    chosen = None if support is None else [_ids(support[number], batches[number], row) for number, row in places]
    scored = server.score(sequences, topk=topk or 0, support=chosen)
    rows: list[dict[int, list[ServedToken]]] = [{} for _ in batches]
    for (number, row), tokens in zip(places, scored, strict=True):
        rows[number][row] = tokens
    return [
        replace(batch, served=served_grid(batch.completion_ids.shape, of_batch, topk=topk or 0))
        for batch, of_batch in zip(batches, rows, strict=True)
    ]


def sequence_of(batch: TrainingBatch, row: int) -> tuple[list[int], list[int]]:
    """Teacher prompt and completion of a row that is distilled."""
    sequences = batch.teacher
    number = int(sequences.predictors[row, 0]) // sequences.ids.shape[1]
    prompt = sequences.ids[number][sequences.segments[number] == 0]
    return prompt.tolist(), batch.completion_ids[row][batch.completion_mask[row]].tolist()


def _ids(support: Tensor, batch: TrainingBatch, row: int) -> list[list[int]]:
    """Of each token of a row, the ids (K) of a support (B, T, K)."""
    ids: list[list[int]] = support[row][batch.completion_mask[row]].tolist()
    return ids


def taught_rows(batch: TrainingBatch) -> list[int]:
    """Rows with a token to distill."""
    rows: list[int] = batch.distillation_mask.any(dim=1).nonzero().squeeze(-1).tolist()
    return rows
