"""Trains tiny models that are pushed to the hub of HF_ENDPOINT, and loads them from there.

Run as a script with a folder, since the client reads the address when it is imported; prints one JSON line.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from conftest import make_model, make_tokenizer
from datasets import Dataset
from huggingface_hub import hf_hub_download, snapshot_download
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM

from sdpo import SDPOConfig, SDPOTrainer

CHAT = [[{"role": "user", "content": f"w{i} w{i + 1}"}] for i in range(3)]


def reward_by_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(turns[-1]["content"].split()) % 2) for turns in completions]


def build(model: str, folder: Path, *, use_lora: bool = False, **settings: Any) -> SDPOTrainer:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if use_lora else None
    data = Dataset.from_dict({"prompt": CHAT})
    return SDPOTrainer(model, reward_by_length, SDPOConfig(**{**given, **settings}), data, peft_config=adapter)


def is_same(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(model.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == twin and torch.equal(a, b) for (name, a), (twin, b) in pairs)


def printed_by_quick_start(repo: str) -> str:
    """What the first block of Python in the repository's card prints."""
    card = Path(hf_hub_download(repo, "README.md")).read_text(encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], {})
    return printed.getvalue()


def answer_of(trainer: SDPOTrainer) -> str:
    """What the trained model answers to the question of a quick start."""
    inputs = trainer.processing_class.apply_chat_template(
        [{"role": "user", "content": "What is 17 + 25?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = trainer.model.eval().generate(**inputs, max_new_tokens=trainer.args.max_completion_length)
    return str(trainer.processing_class.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def push_whole(folder: Path) -> dict[str, Any]:
    """A whole model from a folder, its last checkpoint with it; then resumed from that."""
    base = str(folder / "base")
    trainer = build(base, folder / "whole", max_steps=2, push_to_hub=True, hub_strategy="checkpoint", hub_token="hf_x")
    trainer.train()
    trainer.push_to_hub(dataset_name="tester/sums", license="apache-2.0", tags="sums")
    loaded = AutoModelForCausalLM.from_pretrained("tester/whole")
    checkpoint = Path(snapshot_download("tester/whole", allow_patterns="last-checkpoint/*")) / "last-checkpoint"
    resumed = build(base, folder / "resumed", max_steps=3)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    straight = build(base, folder / "straight", max_steps=3)  # now, since a new trainer sets the seed
    straight.train()
    return {
        "loads": is_same(trainer.model, loaded),
        "resumes": is_same(resumed.model, straight.model),
        "prints": printed_by_quick_start("tester/whole"),
        "answers": answer_of(trainer),
    }


def push_adapter(folder: Path) -> dict[str, Any]:
    """An adapter of a model of the hub."""
    make_model(make_tokenizer(), seed=3).push_to_hub("tester/base")
    make_tokenizer().push_to_hub("tester/base")
    trainer = build("tester/base", folder / "adapter", use_lora=True, max_steps=1)
    trainer.train()
    trainer.push_to_hub()
    loaded = AutoPeftModelForCausalLM.from_pretrained("tester/adapter")
    return {
        "loads": is_same(trainer.model, loaded),
        "prints": printed_by_quick_start("tester/adapter"),
        "answers": answer_of(trainer),
    }


def push_checkpoints(folder: Path) -> None:
    """Every checkpoint of an adapter of a folder, to a hub that is slower than the run; then to one that is full."""
    for name in ("slow", "full"):
        pushed = {"push_to_hub": True, "hub_strategy": "all_checkpoints", "save_total_limit": 1}
        build(str(folder / "base"), folder / name, use_lora=True, max_steps=3, **pushed).train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    workplace = Path(sys.argv[1])
    make_model(make_tokenizer()).save_pretrained(workplace / "base")
    make_tokenizer().save_pretrained(workplace / "base")
    os.chdir(workplace)
    found = {"whole": push_whole(workplace), "adapter": push_adapter(workplace)}
    push_checkpoints(workplace)
    print(json.dumps(found))
