"""A short run that takes its parallelism from a launcher or from a file for DeepSpeed.

python launched.py FOLDER NAME-OF-THE-FILE

With a file for DeepSpeed the model is the one in FOLDER/model, loaded by the trainer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from cases import REWARDS, ROWS, TEXTS, TOKENIZER, SharedScript
from conftest import make_model
from datasets import Dataset

from sdpo import SDPOConfig, SDPOTrainer
from sdpo.sharding import parallelism_of


def main(folder: Path, name: str) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    args = SDPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS // world_size,
        num_generations=ROWS // 2,
        max_completion_length=8,
        max_steps=2,
        use_cpu=True,
        ddp_backend="gloo",
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
        save_strategy="no",
        deepspeed=name if name.endswith(".json") else None,
    )
    if name.startswith("fsdp2"):  # on CPUs accelerate would take it for DDP
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = SDPOTrainer(
        make_model(TOKENIZER) if args.deepspeed is None else str(folder / "model"),
        lambda completions, **_: [REWARDS[text] for text in completions],
        args,
        train_dataset=Dataset.from_dict({"prompt": ["w30 w0", "w31 w1"]}),
        processing_class=TOKENIZER,
    )
    accelerator = trainer.accelerator
    trainer.generator = SharedScript(TEXTS, rank=accelerator.process_index, world_size=world_size)
    trainer.train()
    kind = "fsdp2" if accelerator.is_fsdp2 else parallelism_of(args)
    found = {"processes": accelerator.num_processes, "parallelism": kind, "steps": trainer.state.global_step}
    if accelerator.is_main_process:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
