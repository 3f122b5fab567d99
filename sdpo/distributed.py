"""The only module that issues a collective. Every function is called on every rank, in the same order, always."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from sdpo.types import LossCounts

T = TypeVar("T")


def sum_counts(local: Sequence[LossCounts], accelerator: Accelerator) -> LossCounts:
    """Denominators of the step: the sum over this rank's microbatches and over all ranks."""
    columns = zip(*(astuple(counts) for counts in local), strict=True)
    totals = [sum(column) for column in columns] or [0.0] * len(fields(LossCounts))  # a stream that has ended
    if accelerator.num_processes == 1:
        return LossCounts(*totals)
    tensor = torch.tensor(totals, dtype=torch.float64, device=accelerator.device)
    return LossCounts(*accelerator.reduce(tensor, reduction="sum").tolist())


def first_row(num_rows: int, accelerator: Accelerator) -> int:
    """Index of this rank's first row among all ranks' rows in rank order."""
    return sum(gather_values(num_rows, accelerator)[: accelerator.process_index])


def gather_rows(rows: list[T], accelerator: Accelerator) -> tuple[list[T], int]:
    """All ranks' rows in rank order, and the index of this rank's first row among them."""
    by_rank = gather_values(rows, accelerator)
    start = sum(len(of_rank) for of_rank in by_rank[: accelerator.process_index])
    return [row for of_rank in by_rank for row in of_rank], start


def gather_values(value: T, accelerator: Accelerator) -> list[T]:
    """The value of every rank, in rank order. `value` is any picklable object."""
    return [value] if accelerator.num_processes == 1 else gather_object([value])


def wait(accelerator: Accelerator) -> None:
    """Returns when every rank is here."""
    accelerator.wait_for_everyone()
