"""Which dataset rows a microbatch is made of, and checks of the dataset's columns.

A block takes `prompts_per_block` prompts, each repeated `num_generations` times, in consecutive rows. Ranks take equal
consecutive shares of the block's rows, so a group may span ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

Example = Mapping[str, Any]


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


class BlockSampler(Sampler[list[int]]):
    """Dataset indices of this rank, one list a microbatch: a block's rows where it begins, [] where it is used again.

    The order depends on seed and epoch alone. A short last block is filled from the start of the epoch's order, so
    that every prompt is used in every epoch, or is left out with `drop_last`.
    """

    def __init__(
        self,
        num_prompts: int,
        shape: BlockShape,
        *,
        shuffle: bool,
        seed: int,
        fill_last: bool,
        drop_last: bool = False,
    ):
        self.num_prompts = num_prompts
        self.shape = shape
        self.shuffle = shuffle
        self.seed = seed
        self.fill_last = fill_last
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _num_blocks(self) -> int:
        whole, rest = divmod(self.num_prompts, self.shape.prompts_per_block)
        return whole + (1 if rest and not self.drop_last else 0)

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
            if self.fill_last:
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

    Each rank reads the whole stream and keeps its share. A short last block cannot be filled, since a stream cannot be
    rewound: it is left out with `drop_last`, and is given as it is otherwise.
    """

    def __init__(self, dataset: Any, shape: BlockShape, columns: Sequence[str] | None, *, drop_last: bool):
        self.dataset = dataset
        self.shape = shape
        self.columns = columns
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[Example]]:
        stream = iter(self.dataset)
        size = self.shape.prompts_per_block
        while prompts := list(islice(stream, size)):
            if len(prompts) < size and self.drop_last:
                return
            share = self.shape.local_rows(range(len(prompts)))
            yield [select_columns(prompts[i], self.columns) for i in share]
            for _ in range(self.shape.num_uses - 1):
                yield []


class BlockLoader(DataLoader[Any]):
    """A DataLoader whose sampler learns the epoch."""

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.batch_sampler, BlockSampler):
            self.batch_sampler.set_epoch(epoch)
        elif isinstance(self.dataset, StreamRows) and hasattr(self.dataset.dataset, "set_epoch"):
            self.dataset.dataset.set_epoch(epoch)  # `datasets` streams reshuffle by it; plain torch ones have none


def _same(rows: list[Example]) -> list[Example]:
    return rows


def block_loader(
    dataset: Any,
    shape: BlockShape,
    *,
    columns: Sequence[str] | None,
    shuffle: bool,
    seed: int,
    fill_last: bool,
    drop_last: bool,
    num_workers: int,
) -> BlockLoader:
    """Loader of one list of examples a microbatch (see `BlockSampler`), for a map-style dataset or a stream."""
    generator = torch.Generator().manual_seed(seed)  # its own, so that opening a loader draws nothing from the run's
    if is_stream(dataset):
        rows = StreamRows(dataset, shape, columns, drop_last=drop_last or fill_last)
        return BlockLoader(rows, batch_size=None, num_workers=min(num_workers, 1))
    sampler = BlockSampler(len(dataset), shape, shuffle=shuffle, seed=seed, fill_last=fill_last, drop_last=drop_last)
    return BlockLoader(
        MapRows(dataset, columns),
        batch_sampler=sampler,
        collate_fn=_same,
        num_workers=num_workers,
        generator=generator,
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
            "train_dataset ends before its first optimizer step. Give it more rows, or lower generation_batch_size "
            "or gradient_accumulation_steps, or leave dataloader_drop_last False."
        )
    return []


def is_stream(dataset: Any) -> bool:
    """Whether the dataset can only be iterated."""
    return not hasattr(dataset, "__len__")


def select_columns(example: Example, columns: Sequence[str] | None) -> dict[str, Any]:
    """The example with only these columns (all of them for None)."""
    return {key: value for key, value in example.items() if columns is None or key in columns}


def check_dataset(dataset: Any, *, name: str, num_checked: int = 10_000) -> list[Any]:
    """Prompts of the first `num_checked` rows (of the first row of a stream), for the tokenizer to check.

    Raises:
        ValueError: the dataset is empty or lacks the column `prompt`; the message lists the columns there are.
    """
    head = list(islice(iter(dataset), 1))
    if not head:
        raise ValueError(f"{name} is empty: it has no row to sample a prompt from.")
    if not isinstance(head[0], Mapping) or "prompt" not in head[0]:
        found = sorted(head[0]) if isinstance(head[0], Mapping) else type(head[0]).__name__
        raise ValueError(f"{name} needs a column named 'prompt'; found: {found}. Rename or map yours to it.")
    if is_stream(dataset):
        return [head[0]["prompt"]]
    if hasattr(dataset, "select_columns"):
        dataset = dataset.select_columns(["prompt"])
    return [example["prompt"] for example in islice((dataset[i] for i in range(len(dataset))), num_checked)]


def columns_to_keep(reward_funcs: Sequence[Callable[..., Any]], *, remove_unused: bool) -> list[str] | None:
    """Columns that reach the rewards and the teacher; None for all.

    With `remove_unused`, those are the ones a reward function names, besides `prompt` and `privileged_context`. A
    function that takes `**kwargs` may read any column, so all are kept.
    """
    if not remove_unused:
        return None
    parameters = list(chain.from_iterable(inspect.signature(f).parameters.values() for f in reward_funcs))
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return sorted({"prompt", "privileged_context", *(p.name for p in parameters)})


def named_datasets(train: Any, evaluation: Any) -> list[tuple[str, Any]]:
    """The datasets that were passed, with a name for messages."""
    by_name = evaluation if isinstance(evaluation, dict) else {"": evaluation}
    named = [("train_dataset", train), *((f"eval_dataset {key}".strip(), value) for key, value in by_name.items())]
    return [(name, dataset) for name, dataset in named if dataset is not None]
