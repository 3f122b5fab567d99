"""Kills a training process at random moments, half of them inside a save, and resumes it to the end each time.

Run as a script with a folder and a number of kills; prints one JSON line a kill. Every run is a process of its own,
forked from one that has done the imports.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from conftest import make_model, make_tokenizer
from datasets import Dataset
from peft import LoraConfig
from transformers.trainer_utils import get_last_checkpoint

from sdpo import SDPOConfig, SDPOTrainer
from sdpo.checkpoint import UNFINISHED

STEPS = 12


def reward_by_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(text.split()) % 2) for text in completions]


def train(folder: Path, *, use_lora: bool) -> None:
    """Trains to the end, from the last checkpoint where there is one, and writes student and teacher."""
    tokenizer = make_tokenizer()
    trainer = SDPOTrainer(
        model=make_model(tokenizer),
        reward_funcs=reward_by_length,
        args=SDPOConfig(
            output_dir=str(folder / "run"),
            per_device_train_batch_size=4,
            num_generations=4,
            steps_per_generation=2,
            num_iterations=2,
            max_completion_length=8,
            max_steps=STEPS,
            learning_rate=1e-2,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=2,
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(5)]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if use_lora else None,
    )
    (folder / "run").mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder / "run"))
    [(teacher, _)] = trainer.teacher.parts
    weights = {f"student {n}": p.detach() for n, p in trainer.model.named_parameters()}
    torch.save({**weights, **{f"teacher {n}": p for n, p in teacher.named_parameters()}}, folder / "end.pt")


def start(folder: Path, *, use_lora: bool) -> int:
    """Process id of a training process."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
        os.dup2(1, 2)
        status = 1
        try:
            train(folder, use_lora=use_lora)
            status = 0
        finally:
            os._exit(status)
    return child


def kill(child: int, folder: Path, moment: random.Random, *, in_save: bool, duration: float) -> str:
    """Kills the process: inside its n-th save, or after a random share of a whole run's time. Says where it was."""
    if in_save:
        saves, wanted = 0, moment.randrange(1, STEPS)
        was_saving = False
        while saves < wanted and os.waitpid(child, os.WNOHANG) == (0, 0):
            is_saving = (folder / "run" / UNFINISHED).exists()
            saves += is_saving and not was_saving
            was_saving = is_saving
        time.sleep(moment.random() * 0.02)
    else:
        time.sleep(moment.random() * duration)
    was_saving = (folder / "run" / UNFINISHED).exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    checkpoint = get_last_checkpoint(folder / "run") if (folder / "run").exists() else None
    return f"{'inside a save, ' if was_saving else ''}last {Path(checkpoint).name if checkpoint else None}"


def main(base: Path, num_kills: int) -> None:
    torch.set_num_threads(1)
    references, duration = {}, 0.0
    for use_lora in (False, True):
        folder = base / f"straight-{use_lora}"
        folder.mkdir(parents=True)
        began = time.perf_counter()
        assert os.waitpid(start(folder, use_lora=use_lora), 0)[1] == 0, (folder / "log").read_text()
        duration = time.perf_counter() - began
        references[use_lora] = torch.load(folder / "end.pt")
    moment = random.Random(0)
    for number in range(num_kills):
        use_lora = number % 4 >= 2
        folder = base / f"kill-{number}"
        folder.mkdir()
        child = start(folder, use_lora=use_lora)
        where = kill(child, folder, moment, in_save=number % 2 == 0, duration=duration)
        status = os.waitpid(start(folder, use_lora=use_lora), 0)[1]
        end = torch.load(folder / "end.pt") if status == 0 else {}
        is_equal = end.keys() == references[use_lora].keys() and all(
            torch.equal(tensor, references[use_lora][name]) for name, tensor in end.items()
        )
        print(json.dumps({"kill": number, "lora": use_lora, "where": where, "equal": is_equal}), flush=True)
        if not is_equal:
            print((folder / "log").read_text()[-3000:], file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
