"""The only module that issues a collective. Every function is called on every rank, in the same order, always."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, fields
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn

from sdpo.sharding import StoppedHalfway
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


def gather_to_main(rows: Sequence[T], accelerator: Accelerator) -> list[T]:
    """All ranks' rows in rank order on the main process, none elsewhere. Rows are any picklable objects."""
    if accelerator.num_processes == 1:
        return list(rows)
    by_rank: list[Any] | None = [None] * accelerator.num_processes if accelerator.is_main_process else None
    torch.distributed.gather_object(list(rows), by_rank, dst=0)
    return [row for of_rank in by_rank or [] for row in of_rank]


@contextmanager
def together(accelerator: Accelerator, *, is_joint: bool = False) -> Iterator[None]:
    """Ends every rank with an error that one of them has inside, so that none waits for it for ever.

    All ranks go through it. `is_joint`: what is inside is one thing that the ranks do together. Whoever fails half-way
    in it can tell nobody: its error ends its own process, and the launcher the others. So it is with `StoppedHalfway`.
    """
    if is_joint:
        yield
        return
    error: BaseException | None = None
    try:
        yield
    except StoppedHalfway:
        raise
    except (Exception, SystemExit) as raised:  # a rank that exits without an error would be waited for as well
        error = raised
    texts = gather_values(None if error is None else f"{type(error).__name__}: {error}", accelerator)
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f"Rank {rank} failed. {text}")


@torch.no_grad()
def start_alike(model: nn.Module, accelerator: Accelerator) -> None:
    """Gives every rank the main process's trained parameters, in place.

    The wrapper does that to the student, but teacher and reference are copied before it; and an adapter that a script
    has added without a seed is another one on each rank. FSDP2 takes a piece from each rank, also of the copies.
    """
    if accelerator.num_processes == 1 or accelerator.is_fsdp2:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and not hasattr(parameter, "ds_id"):
            values = parameter.detach().to(accelerator.device)
            torch.distributed.broadcast(values, src=0)
            parameter.copy_(values)


def any_rank(flag: Tensor, accelerator: Accelerator) -> bool:
    """Whether the flag (0-dim, bool) is true on some rank. Waits for the device once."""
    if accelerator.num_processes > 1:
        flag = accelerator.reduce(flag.float(), reduction="sum")
    return flag.item() > 0


def num_behind(number: int, accelerator: Accelerator) -> int:
    """How much smaller the number is than the largest among the ranks."""
    return max(gather_values(number, accelerator)) - number


def wait(accelerator: Accelerator) -> None:
    """Returns when every rank is here."""
    accelerator.wait_for_everyone()


def from_main(function: Callable[[], T], accelerator: Accelerator) -> T:
    """What `function` returns on the main process, on every rank; its error ends every rank."""
    outcome: list[Any] = [None, None]
    error = None
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except Exception as raised:
            error, outcome[1] = raised, f"{type(raised).__name__}: {raised}"
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome, from_process=0)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise RuntimeError(f"The main process failed. {outcome[1]}")
    value: T = outcome[0]
    return value


def missing_backend() -> str | None:
    """What this build of torch lacks to let several processes talk on this machine's devices; None for nothing."""
    if not torch.distributed.is_available():
        return "this build of torch has no torch.distributed"
    if torch.cuda.is_available():
        return None if torch.distributed.is_nccl_available() else "this build of torch has no NCCL"
    return None if torch.distributed.is_gloo_available() else "this build of torch has no gloo"


def subgroup(accelerator: Accelerator, size: int) -> Any:
    """The group of `size` consecutive ranks that this one is in."""
    starts = range(0, accelerator.num_processes, size)
    group, _ = torch.distributed.new_subgroups_by_enumeration([list(range(i, i + size)) for i in starts])
    return group


def gather_in(rows: Sequence[T], group: Any) -> tuple[list[T], int]:
    """Rows of all ranks of a group (None: of this one alone) in rank order, and the index of this rank's first."""
    if group is None:
        return list(rows), 0
    by_rank: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(by_rank, list(rows), group=group)
    start = sum(len(of_rank) for of_rank in by_rank[: torch.distributed.get_rank(group)])
    return [row for of_rank in by_rank for row in of_rank], start
