"""A short run of one rank of several, started by torchrun: python ranks.py FOLDER MODEL [URL PORT].

Without an address the engine is colocated, one in each process. Prints a line of JSON: steps, losses, and the mean
importance weights, which are 1 where the engine draws with the policy's weights.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdpo import SDPOConfig, SDPOTrainer


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


def main(folder: str, model: str, url: str = "", port: str = "0") -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = sorted(token for token in tokenizer.get_vocab() if token.isalpha())[:4]
    if url:
        place: dict[str, Any] = {
            "vllm_mode": "server",
            "vllm_server_base_url": url,
            "vllm_server_timeout": 120.0,
            "vllm_group_port": int(port),
        }
    else:
        arguments = {"enforce_eager": True, "num_gpu_blocks_override": 64}
        place = {"vllm_max_model_length": 128, "vllm_engine_kwargs": arguments}
    args = SDPOConfig(
        output_dir=folder,
        use_vllm=True,
        vllm_check_weights=True,
        per_device_train_batch_size=2,  # a group of four lies across two ranks
        num_generations=4,
        max_completion_length=6,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-3,
        distillation_weight=0.5,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        **place,
    )
    trainer = SDPOTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        reward,
        args,
        train_dataset=Dataset.from_dict({"prompt": [f"{a} {b}" for a in words for b in words]}),
        processing_class=tokenizer,
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found = {
        "steps": trainer.state.global_step,
        "losses": [log["loss"] for log in logs],
        "weights": [log["sampling/importance_weight"] for log in logs],
    }
    if trainer.accelerator.is_main_process:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
