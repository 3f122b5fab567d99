"""What every rank of a launch runs, by name."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from cases import (
    BLEND,
    FSDP2_VARIANTS,
    LORA,
    REWARDS,
    ROWS,
    SAME_UPDATE,
    TEXTS,
    TOKENIZER,
    Case,
    ScriptByPlace,
    ScriptByPrompt,
    arguments,
    build,
    reward_by_text,
    state_of,
    trained,
)
from conftest import make_model
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from sdpo import NonFiniteLossError, Score, compare_teacher, discover, discovery
from sdpo.completion_log import files_in, read_metrics

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
Run = Callable[[Path], Any]
KINDS = ("ddp", "fsdp2")
REUSED = "reused, token level"


# --- the same update ---------------------------------------------------------------------------------


def updates(kind: str, case: Case, folder: Path) -> dict[int, Any]:
    """What the case leaves with one microbatch a step, and with several."""
    found = {}
    for microbatch in (ROWS // WORLD, 2):
        found[microbatch] = trained(
            case.having(kind=kind), folder / str(microbatch), world_size=WORLD, microbatch=microbatch
        )
    return found


def variant(fsdp: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the run of `REUSED` leaves with other settings of FSDP2."""
    case = SAME_UPDATE[REUSED].having(kind="fsdp2", fsdp=fsdp, lora=LORA)
    return trained(case, folder, world_size=WORLD, microbatch=ROWS // WORLD)


def in_bfloat16(kind: str, folder: Path) -> dict[str, Any]:
    """What a run in mixed precision leaves, and the dtypes of what it holds."""
    case = SAME_UPDATE[REUSED].having(kind=kind, bf16=True)
    trainer = build(case, folder, world_size=WORLD, microbatch=ROWS // WORLD)
    trainer.train()
    found = state_of(trainer)
    return {**found, "dtypes": sorted({str(value.dtype) for value in found["weights"].values()})}


# --- errors of one rank ------------------------------------------------------------------------------


def failing_reward(completions: list[str], **_: Any) -> list[float]:
    if RANK == 1:
        raise KeyError("no such verifier")
    return [0.0] * len(completions)


def leaving_reward(completions: list[str], **_: Any) -> list[float]:
    if RANK == 1:
        sys.exit(0)
    return [0.0] * len(completions)


class FailingGenerator(ScriptByPrompt):
    def generate(self, prompt_ids: Any) -> Any:
        if RANK == 1:
            raise MemoryError("the engine is full")
        return super().generate(prompt_ids)


class FailingHook(TrainerCallback):
    def on_teacher_context_built(self, **_: Any) -> None:
        if RANK == 1:
            raise OSError("the disk is full")


class Lonely(TrainerCallback):
    """Logs a number on one rank only."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if RANK == 1:
            self.trainer.metrics["train"].add("only_here", 3.0)


def failing(kind: str, stage: str, folder: Path) -> None:
    reward = {"reward": failing_reward, "exit": leaving_reward}.get(stage, reward_by_text)
    case = BLEND.having(kind=kind, reward=reward)
    trainer = build(case, folder, world_size=WORLD, microbatch=ROWS // WORLD)
    if stage == "generation":
        trainer.generator = FailingGenerator()
    if stage == "hook":
        trainer.add_callback(FailingHook())
    if stage == "prompt":
        encode = trainer.tokenizer.encode_prompts

        def failing_encode(prompts: Any) -> Any:
            if RANK == 1:
                raise ValueError("a prompt that no template takes")
            return encode(prompts)

        trainer.tokenizer.encode_prompts = failing_encode
    try:
        trainer.train()
    except SystemExit as left:  # which would end this process and all the runs after it
        raise RuntimeError(f"SystemExit: {left}") from left


def not_finite(kind: str, folder: Path) -> dict[str, Any]:
    """The error of each rank where the second step of one of them is spoilt, and what the resumed run leaves."""
    settings = {
        "save_strategy": "steps",
        "save_steps": 100,
        "max_steps": 3,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
    }
    case = BLEND.having(kind=kind, **settings)
    layout: dict[str, Any] = {"world_size": WORLD, "microbatch": ROWS // WORLD // 2}

    def made(place: Path) -> Any:
        trainer = build(case, place, **layout)
        if kind == "ddp":  # then the norm of the gradient, which is one number on all ranks, is not looked at
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
        return trainer

    trainer = made(folder)

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        return output * float("nan") if RANK == 1 and module.training and trainer.state.global_step == 1 else output

    trainer.model.model.norm.register_forward_hook(spoil)
    began = time.monotonic()
    try:
        trainer.train()
    except NonFiniteLossError as error:
        found = {"text": str(error), "rows": error.rows, "file": json.loads(error.rows_file.read_text())}
    found["seconds"] = time.monotonic() - began
    straight, resumed = made(folder / "straight"), made(folder)
    straight.train()
    resumed.generator.num_given = ROWS // WORLD  # of the step that was made
    resumed.train(resume_from_checkpoint=True)
    return {**found, "straight": state_of(straight), "resumed": state_of(resumed)}


def lonely_metric(kind: str, folder: Path) -> dict[str, Any]:
    trainer = build(BLEND.having(kind=kind), folder, world_size=WORLD, microbatch=ROWS // WORLD)
    trainer.add_callback(Lonely(trainer))
    trainer.train()
    return state_of(trainer)


def different_data(kind: str, folder: Path) -> None:
    """A dataset that every rank has shuffled for itself."""
    prompts = ["w30 w0 w5", "w31 w1 w5"]
    dataset = Dataset.from_dict({"prompt": prompts[::-1] if RANK else prompts})
    build(BLEND.having(kind=kind), folder, world_size=WORLD, microbatch=ROWS // WORLD, train_dataset=dataset)


# --- before training ---------------------------------------------------------------------------------


def different_start(kind: str, folder: Path) -> dict[str, Any]:
    """What a run leaves whose adapter every rank has drawn for itself."""
    model = make_model(TOKENIZER)
    torch.manual_seed(100 + RANK)
    model = get_peft_model(model, LoraConfig(**LORA))
    case = BLEND.having(kind=kind, beta=0.1)
    trainer = build(case, folder, world_size=WORLD, microbatch=ROWS // WORLD, model=model)
    trainer.train()
    return state_of(trainer)


def sampled_before(kind: str, folder: Path) -> list[str]:
    """Likeliest completions before training; under FSDP2 the main process alone has read the weights."""
    model = make_model(TOKENIZER)
    if kind == "fsdp2" and RANK:
        for parameter in model.parameters():
            parameter.data.zero_()
    fsdp = {"cpu_ram_efficient_loading": True}
    case = BLEND.having(kind=kind, fsdp=fsdp, samples=True, temperature=1e-4)
    trainer = build(case, folder, world_size=WORLD, microbatch=ROWS // WORLD, model=model)
    return trainer.sample([TOKENIZER(text)["input_ids"] for text in ("w30 w0 w5", "w31 w1 w5")])[1]


def reward_with_feedback(completions: list[str], **_: Any) -> list[Score]:
    return [Score(REWARDS[text], "w7 w8") for text in completions]


def compared(kind: str, folder: Path) -> str:
    """What `compare_teacher` says of five questions."""
    case = BLEND.having(kind=kind, reward=reward_with_feedback)
    trainer = build(case, folder, world_size=WORLD, microbatch=ROWS // WORLD)
    trainer.generator = ScriptByPlace()
    return str(compare_teacher(trainer, dataset=[{"prompt": f"w{30 + i} w{i} w5"} for i in range(5)]))


def failing_comparison(kind: str, folder: Path) -> None:
    case = BLEND.having(kind=kind, reward=failing_reward)
    compare_teacher(build(case, folder, world_size=WORLD, microbatch=ROWS // WORLD))


def discovered(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Two searches, one after the other, whose success is one of the last rank's in the second block."""

    def reward(completions: list[str], trainer_state: Any, **_: Any) -> list[Score]:
        is_found = RANK == WORLD - 1 and trainer_state.global_step == 1
        return [Score(1.0) if is_found and i == 0 else Score(0.0, "w7 w8") for i in range(len(completions))]

    if kind == "fsdp2" and WORLD > 1:  # the settings of a search are new ones; see `cases.arguments`
        made = discovery._settings

        def settings(*given: Any, **keywords: Any) -> Any:
            args = made(*given, **keywords)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            return args

        discovery._settings = settings
    model, found = make_model(TOKENIZER), []
    before = [p.clone() for p in model.parameters()]
    case = Case(kind=kind, settings={"include_environment_feedback": True})
    for number in range(2):
        args = arguments(case, folder / str(number), world_size=WORLD, microbatch=2)
        told: list[int] = []
        result = discover(
            model,
            "w30 w0 w5",
            reward,
            budget=3 * ROWS,
            num_generations=ROWS,
            args=args,
            processing_class=TOKENIZER,
            on_attempt=lambda attempt, told=told: told.append(attempt.index),
        )
        is_kept = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        attempts = [(one.index, one.step, one.text, one.reward) for one in result.attempts]
        found.append(
            {"index": result.index, "steps": result.steps, "attempts": attempts, "told": told, "is_kept": is_kept}
        )
    return found


# --- the log of completions --------------------------------------------------------------------------

LOGGED = {"log_completions": True, "num_completions_to_print": 0, "distillation_mode": "topk_logits"}


def logged(kind: str, folder: Path, **layout: Any) -> Any:
    """Rows of the log's files, from the main process; None elsewhere."""
    case = BLEND.having(kind=kind, distillation_topk=5, **LOGGED)
    trainer = build(case, folder, **(layout or {"world_size": WORLD, "microbatch": ROWS // WORLD // 2}))
    trainer.train()
    if not trainer.is_world_process_zero():
        return None
    files = files_in(folder / "completions")
    return {step: pq.read_table(path).to_pylist() for step, path in files.items()}


class Lone(TrainerCallback):
    """Logs a number from the main process, which alone does it."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if RANK == 0:
            self.trainer.log({"only_main": 2.0})


def logged_by_main(kind: str, folder: Path) -> list[float]:
    """What the log's file has of a number that the main process logs."""
    case = BLEND.having(kind=kind, distillation_topk=5, **LOGGED)
    trainer = build(case, folder, world_size=WORLD, microbatch=ROWS // WORLD)
    trainer.add_callback(Lone(trainer))
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    return [entry["only_main"] for entry in read_metrics(folder / "completions") if "only_main" in entry]


def failing_log(kind: str, folder: Path) -> None:
    case = BLEND.having(kind=kind, distillation_topk=5, **LOGGED)
    trainer = build(case, folder, world_size=WORLD, microbatch=ROWS // WORLD)
    if RANK == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "completions").write_text("no folder")
    trainer.train()


# --- evaluation --------------------------------------------------------------------------------------


def evaluated(kind: str, folder: Path, *, num_prompts: int = 5, **settings: Any) -> dict[str, Any]:
    """Metrics of an evaluation before training, and what the training after it leaves."""
    questions = Dataset.from_dict({"prompt": [f"w{30 + i} w{i} w5" for i in range(num_prompts)]})
    case = BLEND.having(
        kind=kind,
        beta=0.1,
        num_generations_eval=1,
        per_device_eval_batch_size=2 // WORLD,
        use_successful_as_teacher=False,
        include_environment_feedback=True,
        **settings,
    )
    privileged = {"privileged_context": ["w7 w8"] * num_prompts}
    questions = Dataset.from_dict({**questions.to_dict(), **privileged})
    trainer = build(case, folder, world_size=WORLD, microbatch=ROWS // WORLD, eval_dataset=questions)
    script, trainer.generator = trainer.generator, ScriptByPrompt()
    found = trainer.evaluate()
    trainer.generator = script
    trainer.train()
    times = ("runtime", "per_second", "time")
    return {"eval": {n: v for n, v in found.items() if not any(t in n for t in times)}, **state_of(trainer)}


# --- sampling ----------------------------------------------------------------------------------------


class Seen(TrainerCallback):
    def __init__(self) -> None:
        self.completions: list[list[int]] = []

    def on_self_distillation_batch_prepared(self, completion_ids: Any, **_: Any) -> None:
        self.completions += [[t for t in row if t != TOKENIZER.pad_token_id] for row in completion_ids.tolist()]


def any_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


def sampled(kind: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """Completions of this rank, all of one prompt, and the logs of a run that samples with the model itself."""
    case = BLEND.having(kind=kind, samples=True, reward=any_reward, num_prompts=1, **settings)
    trainer = build(case, folder, world_size=WORLD, microbatch=ROWS // WORLD)
    seen = Seen()
    trainer.add_callback(seen)
    trainer.train()
    return {"completions": seen.completions, **state_of(trainer)}


# --- checkpoints -------------------------------------------------------------------------------------


def resumed(kind: str, case: Case, folder: Path, **settings: Any) -> dict[str, Any]:
    """What four steps leave, straight and resumed after the second, and the files of checkpoint and final model."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", **settings}
    settings |= {"learning_rate": 1e-2, "num_iterations": 2}
    case = case.having(kind=kind, **settings)
    layout: dict[str, Any] = {"world_size": WORLD, "microbatch": ROWS // WORLD}
    straight = build(case, folder, **layout)
    straight.train()
    found = {"straight": state_of(straight)}
    del straight
    again = build(case, folder, **layout)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    found["resumed"] = state_of(again)
    again.save_model(str(folder / "final"))
    again.accelerator.wait_for_everyone()
    names = {name: sorted(path.name for path in (folder / name).rglob("*")) for name in ("final", "checkpoint-4")}
    return {**found, "files": names, "folder": str(folder)}


def in_parts(kind: str, case: Case, folder: Path, *, name: str, is_resumed: bool = False) -> dict[str, Any]:
    """What four steps with evaluations leave: straight, or from the third one's checkpoint, in a process of its own.

    A block serves two steps, so the checkpoint is in the middle of one. Adam's epsilon is so large that a gradient
    which is zero but for rounding, as that of a key's bias, moves nothing.
    """
    place = folder.parent / name
    case = case.having(
        kind=kind,
        max_steps=4,
        num_iterations=2,
        optim="adamw_torch",
        adam_epsilon=1e-3,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=3,
        eval_strategy="steps",
        eval_steps=2,
        num_generations_eval=1,
        per_device_eval_batch_size=2 // WORLD,
    )
    questions = Dataset.from_dict({"prompt": [f"w{30 + i} w{i} w5" for i in range(5)]})
    trainer = build(case, place, world_size=WORLD, microbatch=ROWS // WORLD, eval_dataset=questions)
    trainer.generator = ScriptByPlace()
    trainer.train(resume_from_checkpoint=str(place / "checkpoint-3") if is_resumed else None)
    trainer.save_model(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    times = ("runtime", "per_second", "time")
    logs = [log for log in trainer.state.log_history if "eval_loss" in log]
    evaluations = [{n: v for n, v in log.items() if not any(t in n for t in times)} for log in logs]
    return {**state_of(trainer), "evaluations": evaluations, "model": str(folder / "final")}


SHARDED = {"state_dict_type": "SHARDED_STATE_DICT"}
CHECKPOINTS: dict[str, tuple[str, Case, dict[str, Any]]] = {
    "ddp": ("ddp", BLEND, {}),
    "fsdp2": ("fsdp2", BLEND.having(beta=0.1), {}),
    "fsdp2, frozen teacher": ("fsdp2", BLEND.having(teacher_model_kind="base"), {}),
    "fsdp2, sharded": ("fsdp2", BLEND, SHARDED),
    "fsdp2, LoRA": ("fsdp2", BLEND.having(lora=LORA), {}),
}


def checkpoints() -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for name, (kind, case, fsdp) in CHECKPOINTS.items():
        runs[f"checkpoint {name}"] = partial(resumed, kind, case.having(fsdp=fsdp))
    return runs


def once(kind: str, case: Case, folder: Path) -> dict[str, Any]:
    """What the case leaves with two microbatches a step."""
    return trained(case.having(kind=kind), folder, world_size=WORLD, microbatch=ROWS // WORLD // 2)


ZERO_KINDS = ("zero2", "zero3")
ZERO_CASES = (
    *("sampled token", "top k", "live teacher", "frozen teacher", "trust region", "reused, sequence level"),
    *("policy gradient with a reference", "tied embeddings", "LoRA", "a rank with nothing but empty completions"),
)

ZERO_PARTS = {"in parts": BLEND.having(beta=0.1), "in parts, LoRA": BLEND.having(lora=LORA)}

SUITES: dict[str, dict[str, Run]] = {
    "zero": {
        **{f"{kind}: {name}": partial(once, kind, SAME_UPDATE[name]) for kind in ZERO_KINDS for name in ZERO_CASES},
        **{f"{kind}: sampling": partial(sampled, kind) for kind in ZERO_KINDS},
        "zero3: sampling on pieces": partial(sampled, "zero3", ds3_gather_for_generation=False),
        **{
            f"{kind}: {name}, {part}": partial(
                in_parts, kind, case, name=f"{kind} {name}", is_resumed=part == "resumed"
            )
            for kind in ZERO_KINDS
            for name, case in ZERO_PARTS.items()
            for part in ("straight", "resumed")
        },
    },
    "four ranks": {
        f"{kind}: {name}": partial(once, kind, case)
        for kind in KINDS
        for name, case in SAME_UPDATE.items()
        if name in ("a group over all ranks", "reused, sequence level", "LoRA", "a rank without a reward")
    },
    "two ranks": {
        **{f"{kind}: {name}": partial(updates, kind, case) for kind in KINDS for name, case in SAME_UPDATE.items()},
        **{f"fsdp2 with {name}": partial(variant, fsdp) for name, fsdp in FSDP2_VARIANTS.items()},
        **{f"{kind}: bfloat16": partial(in_bfloat16, kind) for kind in KINDS},
        **{
            f"{kind}: error in {stage}": partial(failing, kind, stage)
            for kind in KINDS
            for stage in ("reward", "generation", "hook", "prompt", "exit")
        },
        **{f"{kind}: error in compare_teacher": partial(failing_comparison, kind) for kind in KINDS},
        **{f"{kind}: different data": partial(different_data, kind) for kind in KINDS},
        **{f"{kind}: different start": partial(different_start, kind) for kind in KINDS},
        **{f"{kind}: sampling before training": partial(sampled_before, kind) for kind in KINDS},
        **{f"{kind}: compare_teacher": partial(compared, kind) for kind in KINDS},
        **{f"{kind}: discover": partial(discovered, kind) for kind in KINDS},
        **{f"{kind}: a number of the main process": partial(logged_by_main, kind) for kind in KINDS},
        **{f"{kind}: a loss that is not finite": partial(not_finite, kind) for kind in KINDS},
        **{f"{kind}: a metric of one rank": partial(lonely_metric, kind) for kind in KINDS},
        **{f"{kind}: the log of completions": partial(logged, kind) for kind in KINDS},
        **{f"{kind}: error in the log": partial(failing_log, kind) for kind in KINDS},
        **{f"{kind}: evaluation": partial(evaluated, kind) for kind in KINDS},
        **{f"{kind}: sampling": partial(sampled, kind) for kind in KINDS},
        "fsdp2: sampling on pieces": partial(sampled, "fsdp2", ds3_gather_for_generation=False),
        **checkpoints(),
    },
}
assert len(TEXTS) == ROWS
