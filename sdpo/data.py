"""Which dataset rows a microbatch is made of, and checks of the dataset's columns.

A block takes `prompts_per_block` prompts, each repeated `num_generations` times, in consecutive rows. Ranks take equal
consecutive shares of the block's rows, so a group may span ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, count, cycle, islice
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

Example = Mapping[str, Any]

LastBlock = Literal["fill", "drop", "keep"]
"""What becomes of the prompts left at the end of a pass, too few for a block: filled up with the first prompts of the
pass, left out, or given as they are."""


@runtime_checkable
class Reshuffled(Protocol):
    """A stream whose order depends on the number of the pass, as that of a shuffled `datasets` stream does."""

    def set_epoch(self, epoch: int) -> None: ...


@runtime_checkable
class Columnar(Protocol):
    """A dataset that can be read without its other columns, as one of `datasets` can."""

    column_names: list[str]

    def select_columns(self, column_names: list[str]) -> Any: ...


@dataclass(frozen=True, slots=True)
class BlockShape:
    """How blocks are cut: prompts a block, completions a prompt, microbatches that use one block, and this rank."""

    prompts_per_block: int
    num_generations: int
    num_uses: int
    rank: int
    world_size: int

    def local_rows(self, prompts: Sequence[int]) -> list[int]:
        """This rank's share of the block's rows; shares differ by at most one row where they cannot be equal."""
        rows = [prompt for prompt in prompts for _ in range(self.num_generations)]
        start = len(rows) * self.rank // self.world_size
        return rows[start : len(rows) * (self.rank + 1) // self.world_size]


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """How rows are read ahead. Field names are those of `TrainingArguments`, without the prefix `dataloader_`."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False

    @classmethod
    def of(cls, args: Any) -> LoaderSettings:
        """Those of `TrainingArguments`. On a CPU nothing is pinned: torch would only warn that it cannot."""
        return cls(
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            pin_memory=args.dataloader_pin_memory and not args.use_cpu,
        )


class BlockSampler(Sampler[list[int]]):
    """Dataset indices of this rank, one list a microbatch: a block's rows where it begins, [] where it is used again.

    The order depends on seed and epoch alone. `last_block` "fill" takes the start of the epoch's order once more, so
    that every prompt is used in every epoch.
    """

    def __init__(self, num_prompts: int, shape: BlockShape, *, shuffle: bool, seed: int, last_block: LastBlock):
        self.num_prompts = num_prompts
        self.shape = shape
        self.shuffle = shuffle
        self.seed = seed
        self.last_block = last_block
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _num_blocks(self) -> int:
        whole, rest = divmod(self.num_prompts, self.shape.prompts_per_block)
        return whole + (1 if rest and self.last_block != "drop" else 0)

    def __len__(self) -> int:
        return self._num_blocks() * self.shape.num_uses

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.num_prompts))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_prompts, generator=generator).tolist()
        size = self.shape.prompts_per_block
        for block in range(self._num_blocks()):
            prompts = order[block * size : (block + 1) * size]
            if self.last_block == "fill":
                prompts += list(islice(cycle(order), size - len(prompts)))
            yield self.shape.local_rows(prompts)
            for _ in range(self.shape.num_uses - 1):
                yield []


class MapRows(Dataset[Example]):
    """Rows of a map-style dataset by index; the copies of a prompt share one read."""

    def __init__(self, dataset: Any, columns: Sequence[str] | None):
        self.dataset = dataset
        self.columns = columns

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> list[Example]:
        rows = {i: select_columns(self.dataset[i], self.columns) for i in dict.fromkeys(indices)}
        return [rows[i] for i in indices]

    def __getitem__(self, index: int) -> Example:
        return select_columns(self.dataset[index], self.columns)


class StreamRows(IterableDataset[list[Example]]):
    """Blocks of a stream, in the order in which a map-style dataset of the same rows gives them without shuffling.

    Each rank reads the whole stream and keeps its share. `is_endless`: passes follow each other until one has no block
    to give, and a stream that can be reshuffled learns the number of each. `Trainer` then sees one long epoch, so a
    resumed run comes to the same rows by reading what was read before. Otherwise there is one pass, as the stream is.
    `last_block` "fill" takes the first rows of the pass once more; they are kept for that.
    """

    def __init__(
        self,
        dataset: Any,
        shape: BlockShape,
        columns: Sequence[str] | None,
        *,
        last_block: LastBlock,
        is_endless: bool,
    ):
        self.dataset = dataset
        self.shape = shape
        self.columns = columns
        self.last_block = last_block
        self.is_endless = is_endless

    def set_epoch(self, epoch: int) -> None:
        """Tells the stream the number of the pass that begins, where its order depends on it."""
        if isinstance(self.dataset, Reshuffled):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Example]]:
        if not self.is_endless:
            yield from self._one_pass()
            return
        for epoch in count():
            self.set_epoch(epoch)
            has_block = False
            for examples in self._one_pass():
                has_block = True
                yield examples
            if not has_block:
                return

    def _one_pass(self) -> Iterator[list[Example]]:
        stream = iter(self.dataset)
        size = self.shape.prompts_per_block
        first: list[Example] = []
        while prompts := list(islice(stream, size)):
            first = first or list(prompts)
            if len(prompts) < size and self.last_block == "drop":
                return
            if self.last_block == "fill":
                prompts += list(islice(cycle(first), size - len(prompts)))
            share = self.shape.local_rows(range(len(prompts)))
            yield [select_columns(prompts[i], self.columns) for i in share]
            for _ in range(self.shape.num_uses - 1):
                yield []


class BlockLoader(DataLoader[Any]):
    """A DataLoader whose sampler learns the epoch. A stream counts its passes itself."""

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.batch_sampler, BlockSampler):
            self.batch_sampler.set_epoch(epoch)


def _same(rows: list[Example]) -> list[Example]:
    return rows


def block_loader(
    dataset: Any,
    shape: BlockShape,
    settings: LoaderSettings,
    *,
    columns: Sequence[str] | None,
    shuffle: bool,
    seed: int,
    is_training: bool,
    drop_last: bool,
) -> BlockLoader:
    """Loader of one list of examples a microbatch (see `BlockSampler`), for a map-style dataset or a stream.

    Training has whole blocks only: a short last one is filled, or left out with `drop_last`. Evaluation has each row
    once. A stream comes in its own order.

    Raises:
        ValueError: a stream with more than one worker.
    """
    last_block: LastBlock = ("drop" if drop_last else "fill") if is_training else "keep"
    reading: dict[str, Any] = {
        "num_workers": settings.num_workers,
        "prefetch_factor": settings.prefetch_factor,
        "persistent_workers": settings.persistent_workers,
        "pin_memory": settings.pin_memory,
        # Its own, so that opening a loader draws nothing from the run's.
        "generator": torch.Generator().manual_seed(seed),
    }
    if is_stream(dataset):
        _check_workers("the dataset", settings.num_workers)
        rows = StreamRows(dataset, shape, columns, last_block=last_block, is_endless=is_training)
        return BlockLoader(rows, batch_size=None, **reading)
    sampler = BlockSampler(len(dataset), shape, shuffle=shuffle, seed=seed, last_block=last_block)
    return BlockLoader(MapRows(dataset, columns), batch_sampler=sampler, collate_fn=_same, **reading)


def _check_workers(name: str, num_workers: int) -> None:
    """Several workers would each read the whole stream, or share out its files, so rows would come twice or elsewhere.

    Raises:
        ValueError: there are several.
    """
    if num_workers > 1:
        raise ValueError(
            f"dataloader_num_workers={num_workers} does not go with a stream, and {name} is one: each worker would "
            "read it from its start. Set dataloader_num_workers to 1 or 0, or pass a dataset with a length."
        )


def rows_of_step(batches: Iterator[list[Example]], num_batches: int, *, is_first: bool) -> list[list[Example]]:
    """Rows of one optimizer step, a list a microbatch; none where the data end within it, as a stream's may.

    Raises:
        ValueError: they end within the first step, so that nothing could ever be trained.
    """
    step = list(islice(batches, num_batches))
    if len(step) == num_batches:
        return step
    if is_first:
        raise ValueError(
            "train_dataset ends before its first optimizer step: it has fewer prompts than a block takes, which is "
            "generation_batch_size / num_generations. Give it more rows, lower generation_batch_size, or leave "
            "dataloader_drop_last False, so that the block is filled."
        )
    return []


def is_stream(dataset: Any) -> bool:
    """Whether the dataset can only be iterated."""
    return not isinstance(dataset, Sized)


def select_columns(example: Example, columns: Sequence[str] | None) -> dict[str, Any]:
    """The example with only these columns (all of them for None)."""
    return {key: value for key, value in example.items() if columns is None or key in columns}


def check_dataset(
    dataset: Any,
    *,
    name: str,
    demonstration_column: str | None = None,
    num_workers: int = 0,
    num_checked: int = 10_000,
) -> list[Example]:
    """`prompt` and `teacher_prompt` of the first `num_checked` rows (of the first row of a stream), for other checks.

    Raises:
        ValueError: the dataset is empty or lacks the column `prompt` or `demonstration_column`, the message lists the
            columns there are; it is several splits, can be read only once, or is a stream to be read by several
            workers.
    """
    if isinstance(dataset, Mapping):
        raise ValueError(f"{name} is several datasets ({', '.join(map(str, dataset))}); pass one of them.")
    if isinstance(dataset, Iterator):
        raise ValueError(
            f"{name} is a {type(dataset).__name__}, which can be read only once. Pass a list, or a dataset that can "
            "be iterated again, such as datasets.IterableDataset.from_generator."
        )
    head = list(islice(iter(dataset), 1))
    if not head:
        raise ValueError(f"{name} is empty: it has no row to sample a prompt from.")
    if not isinstance(head[0], Mapping) or "prompt" not in head[0]:
        found = sorted(head[0]) if isinstance(head[0], Mapping) else type(head[0]).__name__
        raise ValueError(f"{name} needs a column named 'prompt'; found: {found}. Rename or map yours to it.")
    if demonstration_column is not None and demonstration_column not in head[0]:
        raise ValueError(
            f"demonstration_column={demonstration_column!r} is no column of {name}; found: {sorted(head[0])}. Name "
            "one of these, or leave demonstration_column out."
        )
    read = ["prompt", "teacher_prompt"]
    if is_stream(dataset):
        _check_workers(name, num_workers)
        return [select_columns(head[0], read)]
    if isinstance(dataset, Columnar) and "prompt" in dataset.column_names:  # a transform may make the column
        dataset = dataset.select_columns([column for column in read if column in head[0]])
    return [select_columns(dataset[i], read) for i in range(min(len(dataset), num_checked))]


def columns_to_keep(
    reward_funcs: Sequence[Callable[..., Any]], *, for_teacher: Sequence[str], remove_unused: bool
) -> list[str] | None:
    """Columns that reach the rewards and the teacher; None for all.

    With `remove_unused`, those are the ones a reward function names, besides `prompt` and those `for_teacher`. A
    function that takes `**kwargs` may read any column, so all are kept.
    """
    if not remove_unused:
        return None
    parameters = list(chain.from_iterable(inspect.signature(f).parameters.values() for f in reward_funcs))
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return sorted({"prompt", *for_teacher, *(p.name for p in parameters)})


def named_datasets(train: Any, evaluation: Any) -> list[tuple[str, Any]]:
    """The datasets that were passed, with a name for messages."""
    by_name = evaluation if isinstance(evaluation, dict) else {"": evaluation}
    named = [("train_dataset", train), *((f"eval_dataset {key}".strip(), value) for key, value in by_name.items())]
    return [(name, dataset) for name, dataset in named if dataset is not None]
