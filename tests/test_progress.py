"""Bars of a run: what they count, when they are there, and how long a run still takes."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from conftest import TrainerFactory
from tqdm.std import tqdm
from transformers import TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback

import sdpo.progress
from sdpo import SDPOTrainer
from sdpo.generation.transformers import _Watch
from sdpo.generation.vllm import _ReportingBar
from sdpo.metrics import StageClock
from sdpo.progress import Pace, Progress, functions_note, left_of_run, run_note, tokens_note


class Recorded(tqdm):
    """A bar that draws into memory and keeps the numbers and notes that it was drawn with."""

    bars: ClassVar[list[Recorded]] = []

    def __init__(self, *args: Any, **kwargs: Any):
        self.shown: list[tuple[float, str]] = []
        self.is_open = True
        self.screen = io.StringIO()
        super().__init__(*args, **kwargs, file=self.screen, mininterval=0)
        Recorded.bars.append(self)

    def display(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_open:
            self.shown.append((self.n, self.postfix or ""))
        return super().display(*args, **kwargs)

    def counts(self) -> list[tuple[float, int]]:
        """What the bar stood at and the first number of its note, wherever it had one."""
        return [(n, int(note.split()[0])) for n, note in self.shown if note]

    def close(self) -> None:
        self.is_open = False
        super().close()


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """All bars that are opened, ours and those of transformers; each report is drawn."""
    monkeypatch.setattr(Recorded, "bars", [])
    monkeypatch.setattr(sdpo.progress, "tqdm", Recorded)
    monkeypatch.setattr("transformers.trainer_callback.tqdm", Recorded)
    monkeypatch.setattr(sdpo.progress, "INTERVAL", 0.0)
    monkeypatch.setattr("sdpo.generation.transformers.INTERVAL", 0.0)
    return Recorded.bars


def titles(bars: list[Recorded]) -> list[str]:
    """Beginning of each bar's line; the bar of the training steps has no name."""
    return [bar.desc.removesuffix(": ") for bar in bars]


def test_a_run_has_a_bar_of_its_steps_and_one_each_of_generation_and_scoring(
    make_trainer: TrainerFactory, bars: list[Recorded]
) -> None:
    trainer = make_trainer(disable_tqdm=False, max_steps=2, script=None)
    trainer.train()
    assert titles(bars) == ["", "Generation", "Scoring", "Generation", "Scoring"]
    assert [bar.total for bar in bars] == [2, 4, 4, 4, 4]  # steps; completions and rewards of a block of four
    assert [bar.leave for bar in bars] == [True, False, False, False, False]
    assert not any(bar.is_open for bar in bars)
    assert bars[0].n == 2
    assert bars[0].shown[-1][1].endswith("%") and "00:00 left" in bars[0].shown[-1][1]


def counts_after(steps: range, lengths: list[int], *, with_last: bool) -> list[tuple[int, int]]:
    """(completions finished, tokens) after each number of steps; `with_last`: those that the last step ended too."""
    return [(sum(n < t + with_last for n in lengths), sum(min(n, t) for n in lengths)) for t in steps]


def test_generation_counts_completions_and_tokens_in_each_step(
    make_trainer: TrainerFactory, bars: list[Recorded]
) -> None:
    trainer = make_trainer(disable_tqdm=False, script=None, max_completion_length=24)
    rollouts = trainer.roll_out([trainer.train_dataset[0]] * 32, "train")
    lengths = [len(rollout.completion.ids) for rollout in rollouts]
    assert min(lengths) < 24
    [bar] = bars
    # A completion counts as finished in the step after its end token.
    expected = counts_after(range(1, max(lengths) + 1), lengths, with_last=False)
    assert bar.counts() == expected


def test_generation_by_transformers_counts_the_same_one_step_later(
    make_trainer: TrainerFactory, bars: list[Recorded]
) -> None:
    trainer = make_trainer(disable_tqdm=False, script=None, max_completion_length=24, top_p=0.99)
    rollouts = trainer.roll_out([trainer.train_dataset[0]] * 32, "train")
    lengths = [len(rollout.completion.ids) for rollout in rollouts]
    assert min(lengths) < 24
    [bar] = bars
    # The counts of a step are read in the next one, and after the last there is none.
    assert bar.counts() == counts_after(range(1, max(lengths)), lengths, with_last=True)


def test_a_count_inside_generate_takes_padding_for_nothing() -> None:
    told: list[tuple[int, int]] = []
    watch = _Watch(lambda *counts: told.append(counts), torch.zeros(3, 2, dtype=torch.long), ends=[1])
    watch.next = 0.0
    # Two tokens of prompt, whose 1 is no end; then 5 1 (pad), 5 6 7 and 1 (pad) (pad): 2 + 3 + 1 tokens, 2 finished.
    ids = torch.tensor([[1, 9, 5, 1, 0], [9, 9, 5, 6, 7], [9, 1, 1, 0, 0]])
    assert not watch(ids, None).any()  # it stops nothing
    assert told == []  # counted, and read in the next step
    watch(ids, None)
    assert told == [(2, 6)]


def test_scoring_counts_a_reward_of_each_function_when_it_has_finished(
    make_trainer: TrainerFactory, bars: list[Recorded]
) -> None:
    def first(completions: list[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    async def second(completions: list[Any], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    trainer = make_trainer(disable_tqdm=False, reward_funcs=[first, second])
    trainer.collect([trainer.train_dataset[0]] * 4, "train")
    bar = bars[titles(bars).index("Scoring")]
    assert bar.total == 8
    assert [shown for shown in bar.shown if shown[1]] == [(4, "1 of 2 functions"), (8, "2 of 2 functions")]


def test_evaluation_has_one_bar_that_counts_prompts(make_trainer: TrainerFactory, bars: list[Recorded]) -> None:
    """Five prompts, two completions each and an evaluation batch of four rows: blocks of 2, 2 and 1 prompts."""
    trainer = make_trainer(
        disable_tqdm=False,
        num_generations_eval=2,
        per_device_eval_batch_size=4,
        trainer_kwargs={"eval_dataset": [{"prompt": f"w{i}"} for i in range(5)]},
    )
    trainer.evaluate()
    assert titles(bars) == ["Evaluation", *["Generation", "Scoring"] * 3]
    assert (bars[0].total, bars[0].leave) == (5, False)
    counts = [n for n, _ in bars[0].shown]
    assert list(dict.fromkeys(counts)) == [0, 2, 4, 5]
    assert not any(bar.is_open for bar in bars)


@pytest.mark.parametrize(("disable_tqdm", "rank"), [(True, 0), (False, 1)])
def test_there_are_no_bars_with_disable_tqdm_or_on_another_rank(
    make_trainer: TrainerFactory, bars: list[Recorded], disable_tqdm: bool, rank: int
) -> None:
    args = SimpleNamespace(disable_tqdm=disable_tqdm, process_index=rank)
    progress = Progress(args, StageClock())
    with progress.bar("Generation", 4, unit="completions"):
        progress.report(1, 1)
    with progress.evaluation(4, prompts_per_block=1):
        pass
    assert bars == []
    trainer = make_trainer(disable_tqdm=True, script=None)
    trainer.train()
    assert bars == []
    assert trainer.generator.report is None
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert PrinterCallback in kinds and Progress not in kinds


def test_the_bar_of_transformers_is_replaced_and_can_be_removed_by_its_name(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(disable_tqdm=False)
    found = [type(c) for c in trainer.callback_handler.callbacks if isinstance(c, ProgressCallback)]
    assert found == [Progress]
    trainer.remove_callback(ProgressCallback)
    assert not [c for c in trainer.callback_handler.callbacks if isinstance(c, ProgressCallback)]


def test_where_transformers_shows_a_table_it_stays_and_evaluation_has_no_second_bar(
    make_trainer: TrainerFactory, bars: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, whose callback is another class."""

    class Table(PrinterCallback):
        pass

    monkeypatch.setattr("transformers.trainer.DEFAULT_PROGRESS_CALLBACK", Table)
    trainer = make_trainer(disable_tqdm=False, trainer_kwargs={"eval_dataset": [{"prompt": "w1"}]})
    trainer.train()
    trainer.evaluate()
    assert any(type(callback) is Table for callback in trainer.callback_handler.callbacks)
    assert titles(bars) == ["Generation", "Scoring"] * 2


def test_an_error_of_a_reward_function_closes_all_bars_and_comes_through(
    make_trainer: TrainerFactory, bars: list[Recorded]
) -> None:
    def broken(**_: Any) -> list[float]:
        raise KeyError("answer")

    trainer = make_trainer(disable_tqdm=False, reward_funcs=broken)
    with pytest.raises(RuntimeError, match="reward function `broken` raised KeyError at step 0"):
        trainer.train()
    assert titles(bars) == ["", "Generation", "Scoring"]
    assert not any(bar.is_open for bar in bars)
    assert trainer.progress._bars == []


def test_a_bar_is_drawn_some_times_a_second_however_often_it_is_told(
    make_trainer: TrainerFactory, bars: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpo.progress, "INTERVAL", 0.2)
    now = iter(i / 1000 for i in range(10**6))
    monkeypatch.setattr(sdpo.progress.time, "perf_counter", lambda: next(now))
    progress = Progress(SimpleNamespace(disable_tqdm=False, process_index=0), StageClock())
    with progress.bar("Generation", 10_000, unit="completions", note=tokens_note):
        for number in range(1000):  # a report a millisecond
            progress.report(number, number)
    assert 4 <= len([note for _, note in bars[0].shown if note]) <= 5  # a second has five intervals of 0.2


def test_a_bar_never_shows_more_than_all(bars: list[Recorded]) -> None:
    """A server's or an engine's count may include rows of other ranks."""
    progress = Progress(SimpleNamespace(disable_tqdm=False, process_index=0), StageClock())
    with progress.bar("Generation", 4, unit="completions"):
        progress.report(9, 0)
    assert bars[0].n == 4


def test_an_engines_bar_draws_nothing_and_reports_this_ranks_share(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[int, int]] = []
    list(_ReportingBar(lambda *counts: told.append(counts), 0.5, [1, 2, 3], desc="Adding requests", mininterval=0))
    assert told == []
    bar = _ReportingBar(lambda *counts: told.append(counts), 0.5, total=8, desc="Processed prompts")
    assert bar.format_dict["elapsed"] >= 0.0
    bar.update(4)
    bar.update(4)
    bar.close()
    assert told == [(2, 0), (4, 0)]
    assert capsys.readouterr() == ("", "")


# --- how fast, and how long ------------------------------------------------------------------------------------------


def test_tokens_a_second_are_those_of_the_time_that_generation_took() -> None:
    clock = StageClock()
    clock.count_tokens(300)
    clock.count_tokens(100)
    clock._seconds = {"generation": 5.0, "train": 20.0}
    clock.of_run = {"generation": 8.0}  # 3 of them and no tokens before the last log
    assert clock.per_step()["time/sampled_tokens_per_second"] == 80.0  # 400 / 5
    assert clock.tokens_per_second == 50.0  # 400 / 8
    assert "time/sampled_tokens_per_second" not in clock.per_step()
    clock.clear()
    assert clock.tokens_per_second == 0.0
    assert tokens_note(400, 5.0) == "400 tokens, 80 tokens/s"
    assert tokens_note(0, 5.0) == functions_note(1)(1, 5.0) == ""


def test_a_run_logs_the_tokens_that_it_sampled(make_trainer: TrainerFactory) -> None:
    """The script's 3 + 2 + 4 + 2 words and an end token each."""
    trainer = make_trainer()
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["time/sampled_tokens_per_second"] * log["time/generation"] == pytest.approx(15.0)


def test_what_is_left_takes_as_long_as_the_latest_of_its_kind() -> None:
    pace = Pace()
    pace.add("step", 1.0)
    assert pace.seconds_left({"block": 0, "step": 3, "evaluation": 2}) == 3.0  # no evaluation seen: it counts nothing
    assert pace.seconds_left({"block": 1, "step": 3, "evaluation": 0}) is None  # no block seen
    pace.add("step", 3.0)
    pace.add("block", 10.0)
    pace.add("evaluation", 100.0)
    assert pace.seconds_left({"block": 2, "step": 5, "evaluation": 1}) == 2 * 10.0 + 5 * 2.0 + 100.0
    for _ in range(sdpo.progress.RECENT):
        pace.add("block", 4.0)
    assert pace.seconds_left({"block": 1, "step": 0, "evaluation": 0}) == 4.0  # the 10 is forgotten


def left(step: int, last: int, **settings: Any) -> dict[str, int]:
    """Blocks, steps and evaluations after `step` of `last`."""
    values: dict[str, Any] = {
        "steps_per_generation": 4,
        "num_iterations": 1,
        "gradient_accumulation_steps": 1,
        "eval_strategy": "no",
        "eval_delay": 0,
        **settings,
    }
    state = TrainerState(global_step=step, max_steps=last, eval_steps=5, epoch=settings.get("epoch"))
    return dict(left_of_run(SimpleNamespace(**values), state))


@pytest.mark.parametrize(
    ("step", "settings", "expected"),
    [
        (1, {}, (2, 9, 0)),  # blocks begin at steps 1, 5 and 9 of 10
        (4, {}, (2, 6, 0)),
        (5, {}, (1, 5, 0)),
        (9, {}, (0, 1, 0)),
        (1, {"num_iterations": 2}, (1, 9, 0)),  # at 1 and 9
        (3, {"gradient_accumulation_steps": 8}, (14, 7, 0)),  # two a step
        (4, {"eval_strategy": "steps"}, (2, 6, 2)),  # after 5 and 10
        (5, {"eval_strategy": "steps"}, (1, 5, 2)),  # that of step 5 is to come
        (6, {"eval_strategy": "steps"}, (1, 4, 1)),
        (1, {"eval_strategy": "steps", "eval_delay": 6}, (2, 9, 1)),  # after 10
        (2, {"eval_strategy": "epoch", "epoch": 0.5}, (2, 8, 3)),  # 4 steps an epoch, the third is cut short
        (4, {"eval_strategy": "epoch", "epoch": 1.0}, (2, 6, 3)),
        (5, {"eval_strategy": "epoch", "epoch": 1.25}, (1, 5, 2)),
    ],
)
def test_what_is_left_of_a_run_of_ten_steps(step: int, settings: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert left(step, 10, **settings) == dict(zip(("block", "step", "evaluation"), expected, strict=True))


def test_the_time_left_tells_blocks_from_steps(
    make_trainer: TrainerFactory, bars: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of 8 seconds serves 2 steps of 1 second: after step 1 of 4, 3 steps and 1 block, so 11 seconds.

    Steps alone at the rate of the first, 9 seconds, would give 27.
    """
    clock = {"now": 0.0}
    monkeypatch.setattr(sdpo.progress.time, "perf_counter", lambda: clock["now"])

    class Slow(SDPOTrainer):
        def collect(self, *args: Any) -> Any:
            clock["now"] += 8.0
            return super().collect(*args)

        def training_step(self, *args: Any) -> Any:
            clock["now"] += 1.0
            return super().training_step(*args)

    trainer = make_trainer(disable_tqdm=False, trainer_class=Slow, num_iterations=2, max_steps=4)
    trainer.train()
    notes = list(dict.fromkeys(note.split(",")[0] for _, note in bars[0].shown if note))
    # 3 + 8, 2 + 8, then the second block is there: 1, and 0.
    assert notes == ["00:11 left", "00:10 left", "00:01 left", "00:00 left"]


def test_the_note_of_a_run_has_the_stages_with_the_largest_shares() -> None:
    clock = StageClock()
    clock.of_run = {"generation": 60.0, "scoring": 5.0, "contexts": 0.5, "train": 30.0, "logps": 2.0}
    clock.count_tokens(6000)
    note = run_note(3661.0, clock, elapsed=100.0)
    assert note == "1:01:01 left, 100 tokens/s, generation 60%, train 30%, scoring 5%"
    assert run_note(None, clock, elapsed=6000.0) == "? left, 100 tokens/s, generation 1%"
