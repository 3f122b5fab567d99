"""Streams and datasets with a length give the same blocks, and a stream's passes differ as it says."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from torch.utils.data import IterableDataset

from sdpo.data import BlockShape, LoaderSettings, block_loader, check_dataset, is_stream, rows_of_step

PROMPTS = [f"w{i}" for i in range(5)]


class Numbered(IterableDataset[dict[str, str]]):
    """A stream that says in which pass a row was read."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter([{"prompt": f"{self.epoch}:{prompt}"} for prompt in PROMPTS[:3]])


def shape_of(prompts_per_block: int, *, num_generations: int = 1, num_uses: int = 1, rank: int = 0) -> BlockShape:
    return BlockShape(prompts_per_block, num_generations, num_uses, rank=rank, world_size=1 if rank == 0 else 2)


def loader_of(dataset: Any, shape: BlockShape, settings: LoaderSettings | None = None, **more: Any) -> Any:
    options = {"columns": None, "shuffle": False, "seed": 0, "is_training": True, "drop_last": False, **more}
    return block_loader(dataset, shape, settings or LoaderSettings(), **options)


def prompts_of(batches: Any) -> list[list[str]]:
    return [[example["prompt"] for example in batch] for batch in batches]


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({}, [["w4", "w0"]]),  # filled from the start of the pass
        ({"drop_last": True}, []),
        ({"is_training": False}, [["w4"]]),
        ({"is_training": False, "drop_last": True}, [["w4"]]),  # every row is evaluated
    ],
)
def test_a_stream_ends_a_pass_as_a_dataset_with_a_length(options: dict[str, Any], last: list[list[str]]) -> None:
    rows = Dataset.from_dict({"prompt": PROMPTS})
    expected = [["w0", "w1"], ["w2", "w3"], *last]
    for dataset in (rows, rows.to_iterable_dataset()):
        loader = loader_of(dataset, shape_of(2), **options)
        assert prompts_of(islice(loader, len(expected))) == expected
    assert prompts_of(loader_of(rows, shape_of(2), **options)) == expected


def test_a_dataset_smaller_than_a_block_is_repeated_until_it_fills_one() -> None:
    rows = Dataset.from_dict({"prompt": PROMPTS[:2]})
    for dataset in (rows, rows.to_iterable_dataset()):
        assert prompts_of(islice(loader_of(dataset, shape_of(5)), 1)) == [["w0", "w1", "w0", "w1", "w0"]]


def test_passes_over_a_stream_follow_each_other_and_each_is_announced() -> None:
    loader = loader_of(Numbered(), shape_of(2, num_generations=2, num_uses=2))
    first, again, filled = ["0:w0", "0:w0", "0:w1", "0:w1"], [], ["0:w2", "0:w2", "0:w0", "0:w0"]
    assert prompts_of(islice(loader, 5)) == [first, again, filled, again, [p.replace("0:", "1:", 1) for p in first]]
    assert prompts_of(loader_of(Numbered(), shape_of(3), is_training=False)) == [["-1:w0", "-1:w1", "-1:w2"]]


@pytest.mark.parametrize("settings", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_every_run_reads_the_same_passes_of_a_shuffled_stream(settings: dict[str, Any]) -> None:
    stream = Dataset.from_dict({"prompt": PROMPTS}).to_iterable_dataset().shuffle(seed=1, buffer_size=8)
    loader = loader_of(stream, shape_of(1), LoaderSettings(**settings))
    first, second = (prompts_of(islice(loader, 15)) for _ in range(2))
    assert first == second
    passes = [first[i : i + 5] for i in (0, 5, 10)]
    assert passes[0] != passes[1] != passes[2] and [sorted(p) for p in passes] == [[[p] for p in PROMPTS]] * 3


def test_a_worker_reads_a_stream_as_the_process_itself_does() -> None:
    rows = [prompts_of(islice(loader_of(Numbered(), shape_of(2), LoaderSettings(num_workers=n)), 4)) for n in (0, 1)]
    assert rows[0] == rows[1]


def test_a_stream_that_can_be_read_once_ends() -> None:
    once = iter([{"prompt": "w0"}, {"prompt": "w1"}])
    assert prompts_of(loader_of(once, shape_of(1))) == [["w0"], ["w1"]]


def test_several_workers_and_a_stream_are_refused() -> None:
    stream = Dataset.from_dict({"prompt": PROMPTS}).to_iterable_dataset()
    with pytest.raises(ValueError, match="dataloader_num_workers=2 does not go with a stream, and train_dataset is"):
        check_dataset(stream, name="train_dataset", num_workers=2)
    with pytest.raises(ValueError, match="dataloader_num_workers=2"):
        loader_of(stream, shape_of(1), LoaderSettings(num_workers=2))
    assert check_dataset(Dataset.from_dict({"prompt": PROMPTS}), name="train_dataset", num_workers=2) == [
        {"prompt": prompt} for prompt in PROMPTS
    ]


def test_how_rows_are_read_ahead_comes_from_the_arguments() -> None:
    arguments = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True, "pin_memory": True}
    given = SimpleNamespace(**{f"dataloader_{name}": value for name, value in arguments.items()}, use_cpu=False)
    assert LoaderSettings.of(given) == LoaderSettings(**arguments)
    given.use_cpu = True
    assert not LoaderSettings.of(given).pin_memory
    loader = loader_of(Dataset.from_dict({"prompt": PROMPTS}), shape_of(1), LoaderSettings.of(given))
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 4, True)


def test_a_last_block_smaller_than_the_ranks_leaves_one_without_rows() -> None:
    rows = Dataset.from_dict({"prompt": PROMPTS[:1]})
    shares = []
    for rank in (0, 1):
        shape = BlockShape(2, num_generations=1, num_uses=1, rank=rank, world_size=2)
        shares.append(prompts_of(loader_of(rows, shape, is_training=False)))
    assert shares == [[[]], [["w0"]]]


def test_data_that_end_within_the_first_step_say_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"fewer prompts than a block.*dataloader_drop_last False"):
        rows_of_step(iter([]), 2, is_first=True)
    assert rows_of_step(iter([[{"prompt": "w0"}]]), 2, is_first=False) == []


def test_a_stream_has_no_length() -> None:
    assert is_stream(Numbered()) and is_stream(iter([])) and not is_stream([{"prompt": "w0"}])


def test_a_dataset_that_is_several_or_can_be_read_once_is_refused() -> None:
    rows = [{"prompt": "w1"}, {"prompt": "w2"}]
    with pytest.raises(ValueError, match=r"train_dataset is several datasets \(train, test\)"):
        check_dataset({"train": rows, "test": rows}, name="train_dataset")
    once = iter(rows)
    with pytest.raises(ValueError, match="read only once"):
        check_dataset(once, name="train_dataset")
    assert len(list(once)) == 2, "nothing was taken from it"


def test_a_transform_may_make_the_prompt() -> None:
    dataset = Dataset.from_dict({"question": ["a", "b"]})
    dataset = dataset.with_transform(lambda batch: {"prompt": [f"ask {q}" for q in batch["question"]]})
    assert check_dataset(dataset, name="train_dataset") == [{"prompt": "ask a"}, {"prompt": "ask b"}]


def test_the_column_of_demonstrations_has_to_be_there() -> None:
    rows = [{"prompt": "w1", "worked": "w2"}]
    assert check_dataset(rows, name="train_dataset", demonstration_column="worked") == [{"prompt": "w1"}]
    with pytest.raises(
        ValueError, match=r"demonstration_column='solution' is no column of train_dataset; found: \['pro"
    ):
        check_dataset(rows, name="train_dataset", demonstration_column="solution")
