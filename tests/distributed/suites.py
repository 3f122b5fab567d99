"""What every rank of a launch runs, by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from cases import (
    BLEND,
    FSDP2_VARIANTS,
    LORA,
    ROWS,
    SAME_UPDATE,
    TEXTS,
    TOKENIZER,
    Case,
    ScriptByPrompt,
    build,
    reward_by_text,
    state_of,
    trained,
)
from datasets import Dataset
from transformers import TrainerCallback

from sdpo.completion_log import files_in

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
    case = BLEND.having(kind=kind, reward=failing_reward if stage == "reward" else reward_by_text)
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
    trainer.train()


def lonely_metric(kind: str, folder: Path) -> dict[str, Any]:
    trainer = build(BLEND.having(kind=kind), folder, world_size=WORLD, microbatch=ROWS // WORLD)
    trainer.add_callback(Lonely(trainer))
    trainer.train()
    return state_of(trainer)


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

SUITES: dict[str, dict[str, Run]] = {
    "zero": {
        **{f"{kind}: {name}": partial(once, kind, SAME_UPDATE[name]) for kind in ZERO_KINDS for name in ZERO_CASES},
        **{f"{kind}: sampling": partial(sampled, kind) for kind in ZERO_KINDS},
        "zero3: sampling on pieces": partial(sampled, "zero3", ds3_gather_for_generation=False),
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
            for stage in ("reward", "generation", "hook", "prompt")
        },
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
