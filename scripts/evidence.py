"""Held-out accuracy against generations: self-distillation in its variants, and the policy gradient.

    python scripts/evidence.py --jobs 2                                 # every run that has no result yet
    python scripts/evidence.py --tasks code --variants both grpo --seeds 1 2
    python scripts/evidence.py --plot                                   # curves and tables of docs/evidence.md

A run is one task, one variant and one seed, in a process of its own with one thread, on the demo's model. Its result
is a file in `--results`: the teacher's accuracy before training, held-out accuracy at several points, settings and
versions. All runs of a task have the same number of generations. A run whose file is there is not repeated; give
another folder to repeat those that are kept in docs/evidence. Logs go to outputs/evidence.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "scripts")]

WORK = ROOT / "outputs" / "evidence"  # logs, and results of runs that are cut short
TEACHER = "teacher"  # a run that trains nothing: the teacher beside the student, as all variants of a task begin
PACKAGES = ("torch", "transformers", "sdpo")
SEEDS = (1, 2, 3)
NUM_COMPARED = 24  # questions that teacher and student are compared on


@dataclass(frozen=True)
class Task:
    """What is learned: training rows, held-out rows and reward; settings; and where accuracy is measured, in steps."""

    build: Callable[[], tuple[list[Any], list[Any], Any]]
    settings: Mapping[str, Any]
    points: Sequence[int]
    num_samples: int


def equations() -> tuple[list[Any], list[Any], Any]:
    from demo_tasks import build_task

    task = build_task("written_sum", num_held_out=30)
    return list(task.train), list(task.held_out), task.reward


def instructions() -> tuple[list[Any], list[Any], Any]:
    from instruction_tasks import instruction_rows

    from sdpo.rewards import InstructionReward

    rows = instruction_rows()
    return rows[20:], rows[:20], InstructionReward(is_strict=True)


def code() -> tuple[list[Any], list[Any], Any]:
    from code_tasks import code_rows, split_functions

    from sdpo.rewards import CodeReward

    train, held_out = split_functions(num_held_out=24)
    return code_rows(train, "public"), code_rows(held_out, "private"), CodeReward()


SHARED: Mapping[str, Any] = {
    "distillation_mode": "topk_logits",
    "distillation_topk": 20,
    "distillation_alpha": 0.5,
    "num_generations": 8,
    "temperature": 0.6,  # at 1 a model of this size is as noisy with a context as without
    "per_device_eval_batch_size": 128,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 2,
    "include_environment_feedback": True,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "logging_steps": 1,
    "use_cpu": True,
    "disable_tqdm": True,
}
SOLUTION = "Correct solution:\n\n{successful_previous_attempt}\n\n\nCorrectly solve the original question.\n"
# Templates that leave the format of the answer to the question.
TASKS: Mapping[str, Task] = {
    "equations": Task(
        equations,
        {
            "per_device_train_batch_size": 32,
            "max_completion_length": 28,
            "reprompt_template": "{feedback}{prompt}{solution}",
            "feedback_template": "{feedback_raw}\n\n",
            "solution_template": "\n" + SOLUTION,
        },
        points=(0, 2, 4, 8),
        num_samples=4,
    ),
    "instructions": Task(
        instructions,
        {
            "per_device_train_batch_size": 32,
            "max_completion_length": 32,
            "reprompt_template": "{prompt}{feedback}{solution}",
            "feedback_template": " {feedback_raw}",
            "solution_template": "\n" + SOLUTION,
        },
        points=(0, 2, 4, 8),
        num_samples=4,
    ),
    "code": Task(
        code,
        {
            "per_device_train_batch_size": 32,
            "max_completion_length": 48,
            "learning_rate": 3e-5,
            "reprompt_template": "{solution}{prompt}{feedback}",
            "feedback_template": "\n\n{feedback_raw}",
            "solution_template": "{successful_previous_attempt}\n\n",
        },
        points=(0, 2, 4, 8),
        num_samples=4,
    ),
}
# What a run changes of the settings above; in these both a sibling's success and the feedback are shown.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "both": {},
    "feedback": {"use_successful_as_teacher": False},
    "siblings": {"include_environment_feedback": False},
    "grpo": {"distillation_weight": 0.0},
    "blend": {"distillation_weight": 0.5},
    "teacher_base": {"teacher_model_kind": "base"},
    "teacher_live": {"teacher_model_kind": "live"},
    "teacher_trust_region": {"teacher_model_kind": "trust_region"},
    "reverse_kl": {"distillation_alpha": 1.0},
    "sampled_token": {"distillation_mode": "sampled_token", "distillation_topk": None, "distillation_alpha": 1.0},
}


# --- one run ---------------------------------------------------------------------------------------------------------


def run(task_name: str, variant: str, seed: int, results: Path, *, max_steps: int | None) -> None:
    """Trains one variant on one task from one seed, or compares its teachers, and writes the result."""
    task = TASKS[task_name]
    import common
    import torch
    from datasets import Dataset
    from demo_model import embedded_model
    from transformers import TrainerCallback

    from sdpo import SDPOConfig, SDPOTrainer, compare_teacher
    from sdpo.teacher_check import Estimate

    torch.set_num_threads(1)
    start = time.perf_counter()
    points = sorted({p for p in task.points if max_steps is None or p < max_steps} | ({max_steps} - {None}))
    train, held_out, reward = task.build()
    changes = {} if variant == TEACHER else VARIANTS[variant]
    settings = {**SHARED, **task.settings, **changes, "seed": seed, "max_steps": points[-1]}
    folder = WORK / "runs" / name_of(task_name, variant, seed)
    trainer = SDPOTrainer(
        embedded_model(), reward, SDPOConfig(output_dir=str(folder), **settings), Dataset.from_list(train)
    )
    a_step = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    measured: list[dict[str, Any]] = []

    def measure(step: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1000 + step)  # the same for all variants
            rates = common.success_rates(trainer, Dataset.from_list(held_out), num_samples=task.num_samples)
        found = Estimate.of(rates)
        measured.append(
            {
                "generations": step * a_step,
                "accuracy": found.mean,
                "standard_error": found.standard_error,
                "by_question": rates,
                "seconds": time.perf_counter() - start,
            }
        )
        print(f"step {step}: {found.mean:.3f} ({found.standard_error:.3f})", flush=True)

    class Measure(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in points:
                measure(state.global_step)

    teacher = None
    if variant == TEACHER:
        teacher = compare_teacher(trainer, num_prompts=NUM_COMPARED if max_steps is None else 2)
        print(teacher, flush=True)
    else:
        measure(0)
        trainer.add_callback(Measure())
        trainer.train()
    result = {
        "task": task_name,
        "variant": variant,
        "seed": seed,
        "settings": settings,
        "teacher": None if teacher is None else asdict(teacher),
        "points": measured,
        "seconds": time.perf_counter() - start,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }
    write(results / f"{name_of(task_name, variant, seed)}.json", json.dumps(result))


def name_of(task: str, variant: str, seed: int) -> str:
    return f"{task}-{variant}-{seed}"


def write(path: Path, text: str) -> None:
    """Writes a file that is there only when it is whole, so that a run which is cut off is repeated."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


# --- all runs --------------------------------------------------------------------------------------------------------


def run_all(runs: Sequence[tuple[str, str, int]], results: Path, *, jobs: int, max_steps: int | None) -> int:
    """Starts every run without a result, `jobs` at once; the number of those that failed."""
    waiting = [run for run in runs if not (results / f"{name_of(*run)}.json").exists()]
    print(f"{len(runs) - len(waiting)} of {len(runs)} runs have a result in {results}", flush=True)
    (WORK / "logs").mkdir(parents=True, exist_ok=True)

    def start(one: tuple[str, str, int]) -> bool:
        task, variant, seed = one
        words = [sys.executable, __file__, "--results", str(results), "--one", task, variant, str(seed)]
        words += ["--max_steps", str(max_steps)] if max_steps else []
        log = WORK / "logs" / f"{name_of(*one)}.txt"
        with log.open("w") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            is_done = subprocess.run(words, stdout=file, stderr=file, env=environment, check=False).returncode == 0
        print(f"{name_of(*one)} {'done' if is_done else f'FAILED, see {log}'}", flush=True)
        return is_done

    with ThreadPoolExecutor(jobs) as pool:
        return sum(not is_done for is_done in pool.map(start, waiting))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "evidence", help="Folder of the results.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--variants", nargs="+", choices=[TEACHER, *VARIANTS], default=[TEACHER, *VARIANTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--jobs", type=int, default=1, help="Runs at once, of one thread each.")
    parser.add_argument("--max_steps", type=int, help="Steps of each run, to try it.")
    parser.add_argument("--plot", action="store_true", help="Make curves and tables of the results there are.")
    parser.add_argument("--one", nargs=3, metavar=("TASK", "VARIANT", "SEED"), help="Do one run, in this process.")
    arguments = parser.parse_args()
    if arguments.one is not None:
        task, variant, seed = arguments.one
        run(task, variant, int(seed), arguments.results, max_steps=arguments.max_steps)
        return 0
    if arguments.max_steps is not None:  # a shorter run is no result of the longer one
        arguments.results = WORK / f"{arguments.max_steps}-steps"
    if arguments.plot:
        from evidence_report import report

        report(arguments.results, ROOT / "docs")
        return 0
    runs = list(product(arguments.tasks, arguments.variants, arguments.seeds))
    return min(1, run_all(runs, arguments.results, jobs=arguments.jobs, max_steps=arguments.max_steps))


if __name__ == "__main__":
    sys.exit(main())
