"""Bars of a run: what a long stage has done so far, and how long the run still takes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from tqdm.auto import tqdm
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, ProgressCallback

from sdpo.metrics import StageClock

Kind = Literal["block", "step", "evaluation"]
Note = Callable[[int, float], str]
"""What stands behind a bar, from the second number reported and the seconds since it was opened."""

INTERVAL = 0.2  # seconds between two drawings of a bar
RECENT = 20  # of each kind that an estimate is made of: completions grow longer or shorter in the course of a run
# Without tqdm's rate and time left, which take all steps for equal.
FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}{postfix}]"


class Pace:
    """Seconds of a block, of a step without what it collects, and of an evaluation; each the mean of the latest."""

    def __init__(self) -> None:
        self._seconds: dict[Kind, deque[float]] = {}

    def add(self, kind: Kind, seconds: float) -> None:
        """One more of the kind took so long."""
        self._seconds.setdefault(kind, deque(maxlen=RECENT)).append(seconds)

    def seconds_left(self, left: Mapping[Kind, int]) -> float | None:
        """What so many of each kind will take. None where a block or a step is left and none has been seen yet.

        An evaluation that has not been seen counts as nothing.
        """
        seen = {kind: sum(seconds) / len(seconds) for kind, seconds in self._seconds.items()}
        if any(number and kind not in seen and kind != "evaluation" for kind, number in left.items()):
            return None
        return sum(number * seen.get(kind, 0.0) for kind, number in left.items())


def left_of_run(args: Any, state: TrainerState) -> dict[Kind, int]:
    """Blocks, steps and evaluations after optimizer step `state.global_step`, whose own evaluation is to come."""
    step, last = state.global_step, state.max_steps
    uses = args.steps_per_generation * args.num_iterations
    begun, all_blocks = (math.ceil(number * args.gradient_accumulation_steps / uses) for number in (step, last))
    num_evaluations = 0
    if args.eval_strategy == "steps":
        first = math.ceil(max(step, args.eval_delay))
        num_evaluations = last // int(state.eval_steps) - (first - 1) // int(state.eval_steps)
    elif args.eval_strategy == "epoch" and state.epoch:
        # An epoch that has ended has its evaluation before it. Rounding must not add an epoch.
        num_evaluations = (
            math.ceil(state.epoch * last / step - 1e-6) - math.ceil(max(state.epoch, args.eval_delay)) + 1
        )
    return {"block": all_blocks - begun, "step": last - step, "evaluation": max(num_evaluations, 0)}


def tokens_note(tokens: int, seconds: float) -> str:
    """Of a bar whose second number counts tokens; empty where they are not known."""
    return f"{tokens} tokens, {tokens / max(seconds, 1e-9):.0f} tokens/s" if tokens else ""


def functions_note(num_functions: int) -> Note:
    """Of a bar whose second number counts reward functions; empty where there is only one."""
    return lambda done, _: f"{done} of {num_functions} functions" if num_functions > 1 else ""


@dataclass(slots=True)
class _Bar:
    """`start`, `drawn`: when it was opened and last drawn, in seconds."""

    tqdm: Any
    note: Note
    start: float
    drawn: float


class Progress(ProgressCallback):
    """The bar of the training steps, and below it those of generation, scoring and evaluation while they last.

    On the main process, and not with `disable_tqdm`; elsewhere nothing is drawn. The bar of the training steps takes
    the place of transformers' own. A notebook keeps transformers' table, and its bar of an evaluation.
    """

    training_bar: Any  # of the class below; None while no training runs

    def __init__(self, args: Any, clock: StageClock):
        super().__init__()
        self.is_shown = args.process_index == 0 and not args.disable_tqdm
        self.clock = clock
        self.pace = Pace()
        self._bars: list[_Bar] = []
        self._has_run_bar = False
        self._start = self._mark = time.perf_counter()
        self._collecting = self._evaluating = 0.0  # seconds since the mark, which is the end of the last step
        self._count_block: Callable[[], None] | None = None

    def take_place(self, handler: CallbackHandler) -> None:
        """Puts itself where transformers' own bar is."""
        places = [i for i, callback in enumerate(handler.callbacks) if type(callback) is ProgressCallback]
        if self.is_shown and places:
            handler.callbacks[places[0]] = self
            self._has_run_bar = True

    # --- stages -----------------------------------------------------------------------------------

    @contextmanager
    def bar(self, stage: str, total: int | None, *, unit: str, note: Note = lambda *_: "") -> Iterator[None]:
        """Inside, a bar of the stage, which `report` moves; `total` None: it is not known."""
        if not self.is_shown:
            yield
            return
        options = {"leave": False, "dynamic_ncols": True, "bar_format": FORMAT}
        now = time.perf_counter()
        bar = _Bar(tqdm(total=total, desc=stage, unit=unit, **options), note, start=now, drawn=now)
        self._bars.append(bar)
        try:
            yield
        finally:
            self._bars.remove(bar)
            bar.tqdm.close()

    def report(self, done: int, number: int) -> None:
        """So much of the innermost bar is done; `number` is what the bar's note is made of. It may be called often."""
        now = time.perf_counter()
        if not self._bars or now - self._bars[-1].drawn < INTERVAL:
            return
        bar = self._bars[-1]
        bar.drawn = now
        bar.tqdm.n = done if bar.tqdm.total is None else min(done, bar.tqdm.total)
        bar.tqdm.set_postfix_str(bar.note(number, now - bar.start))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, a block is collected for training."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._collecting += seconds
        self.pace.add("block", seconds)

    @contextmanager
    def evaluation(self, num_prompts: int | None, *, prompts_per_block: int) -> Iterator[None]:
        """Inside, an evaluation runs over so many prompts; None: it is not known how many."""
        if not self._has_run_bar:
            yield
            return
        done = 0

        def count_block() -> None:
            nonlocal done
            done += prompts_per_block
            self.report(done, 0)

        start = time.perf_counter()
        self._count_block = count_block
        try:
            with self.bar("Evaluation", num_prompts, unit="prompts"):
                yield
        finally:
            self._count_block = None
        self._evaluating += time.perf_counter() - start

    def close(self) -> None:
        """Ends the bar of the training steps where an error has left it open."""
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    # --- events -----------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.pace = Pace()
        self._start = self._mark = time.perf_counter()
        self._collecting = self._evaluating = 0.0
        self.training_bar.bar_format, self.training_bar.unit = FORMAT, "steps"
        self.training_bar.refresh()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.pace.add("step", now - self._mark - self._collecting - self._evaluating)
        if self._evaluating:  # those of all datasets are one
            self.pace.add("evaluation", self._evaluating)
        self._mark, self._collecting, self._evaluating = now, 0.0, 0.0
        seconds_left = self.pace.seconds_left(left_of_run(args, state))
        note = run_note(seconds_left, self.clock, elapsed=now - self._start)
        self.training_bar.set_postfix_str(note, refresh=False)
        super().on_step_end(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        note = run_note(0.0, self.clock, elapsed=time.perf_counter() - self._start)
        self.training_bar.set_postfix_str(note, refresh=False)  # an evaluation after the last step was still to come
        super().on_train_end(args, state, control, **kwargs)

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Counts prompts, where transformers' own bar counts blocks."""
        if self._count_block is not None:
            self._count_block()


def run_note(seconds_left: float | None, clock: StageClock, *, elapsed: float) -> str:
    """Time left, tokens sampled a second, and the stages that took the largest shares of `elapsed` seconds."""
    left = "?" if seconds_left is None else tqdm.format_interval(seconds_left)
    largest = sorted(clock.of_run.items(), key=lambda item: -item[1])[:3]
    shares = [f"{stage} {seconds / elapsed:.0%}" for stage, seconds in largest if seconds >= 0.01 * elapsed]
    return ", ".join([f"{left} left", f"{clock.tokens_per_second:.0f} tokens/s", *shares])
