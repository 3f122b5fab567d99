"""A teacher that a server scores: the current policy, on the teacher's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from sdpo.types import Served, ServedToken, TrainingBatch


class Scorer(Protocol):
    """A server that holds the policy's weights."""

    def sync(self, step: int) -> None: ...

    def score(self, sequences: Sequence[tuple[list[int], list[int]]], *, topk: int) -> list[list[ServedToken]]: ...


def attach_served(
    batches: Sequence[TrainingBatch], server: Scorer, *, step: int, topk: int | None
) -> list[TrainingBatch]:
    """The microbatches with what the server says of their teacher, under the weights after `step` steps.

    On every rank, also one that has nothing to score.
    """
    server.sync(step)  # also where rollouts are reused: the weights have moved since they were sampled
    rows = [(number, row) for number, batch in enumerate(batches) for row in _taught_rows(batch)]
    scored = server.score([sequence_of(batches[number], row) for number, row in rows], topk=topk or 0)
    found = [_empty(batch, topk or 0) for batch in batches]
    for (number, row), tokens in zip(rows, scored, strict=True):
        length = len(tokens)
        found[number].logps[row, :length] = torch.tensor([token.logp for token in tokens])
        if topk:
            found[number].ids[row, :length] = torch.tensor([token.ids for token in tokens])
            found[number].support_logps[row, :length] = torch.tensor([token.logps for token in tokens])
    return [replace(batch, served=served) for batch, served in zip(batches, found, strict=True)]


def sequence_of(batch: TrainingBatch, row: int) -> tuple[list[int], list[int]]:
    """Teacher prompt and completion of a row that is distilled."""
    sequences = batch.teacher
    number = int(sequences.predictors[row, 0]) // sequences.ids.shape[1]
    prompt = sequences.ids[number][sequences.segments[number] == 0]
    return prompt.tolist(), batch.completion_ids[row][batch.completion_mask[row]].tolist()


def _taught_rows(batch: TrainingBatch) -> list[int]:
    rows: list[int] = batch.distillation_mask.any(dim=1).nonzero().squeeze(-1).tolist()
    return rows


def _empty(batch: TrainingBatch, topk: int) -> Served:
    shape = batch.completion_ids.shape
    return Served(
        logps=torch.zeros(shape),
        ids=torch.zeros((*shape, topk), dtype=torch.long),
        support_logps=torch.zeros((*shape, topk)),
    )
