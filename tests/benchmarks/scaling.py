"""Memory and time of a training step beside the formulas of docs/scaling.md; one process, or several by torchrun.

    python tests/benchmarks/scaling.py
    python -m torch.distributed.run --standalone --nproc_per_node 2 tests/benchmarks/scaling.py [--fsdp]

Models of three sizes, float32 on CPUs, AdamW, an EMA teacher; completions are given, not sampled. Bytes that a rank
holds in parameters, gradients, optimizer and teacher, and their ratio to the formula; processor seconds of a step
without sampling (median of the steps after the first), and multiplications a second by the formula, which is a
constant where the formula is right.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import make_tokenizer

from sdpo import SDPOConfig, SDPOTrainer
from sdpo.sharding import local
from sdpo.types import Completion

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
VOCABULARY, PROMPT, COMPLETION, ROWS, STEPS = 8000, 32, 96, 8, 4
SIZES = {"small": (256, 4), "medium": (384, 6), "large": (512, 8)}  # hidden size, layers


class Fixed:
    """Completions of one length, without meaning."""

    def sync(self, step: int) -> None:
        pass

    def generate(self, prompt_ids: Any) -> list[Completion]:
        ids = [[8 + (i * 13 + t * 7) % 100 for t in range(COMPLETION)] for i in range(len(prompt_ids))]
        return [Completion(one, is_truncated=True) for one in ids]


class Watch(TrainerCallback):
    """Processor seconds of the steps, and the bytes of gradients where they are largest."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.gradients = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begins.append(time.process_time())

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.gradients = size_of(p.grad for p in model.parameters() if p.grad is not None)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.process_time())


def size_of(tensors: Any) -> int:
    """Bytes that this rank holds."""
    return sum(local(tensor).nbytes for tensor in tensors)


def half_right(completions: list[str], **_: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


def build(hidden: int, layers: int, folder: str, *, fsdp: bool) -> SDPOTrainer:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    plan = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    }
    args = SDPOConfig(
        output_dir=folder,
        per_device_train_batch_size=ROWS // WORLD,
        num_generations=ROWS // WORLD,
        max_completion_length=COMPLETION,
        distillation_mode="full_logits",
        distillation_alpha=0.5,
        max_steps=STEPS,
        learning_rate=1e-5,
        gradient_checkpointing=False,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        dont_reprompt_on_self_success=False,
        **({"ddp_backend": "gloo"} if WORLD > 1 else {}),
        **({"fsdp": True, "fsdp_config": plan} if fsdp else {}),
    )
    if fsdp:  # on CPUs accelerate would take it for DDP
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    prompts = [" ".join(f"w{(i + t) % 40}" for t in range(PROMPT)) for i in range(WORLD)]
    trainer = SDPOTrainer(
        LlamaForCausalLM(config),
        half_right,
        args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
    trainer.generator = Fixed()
    return trainer


def multiplications(trainer: SDPOTrainer, hidden: int, layers: int) -> float:
    """Of a step of this rank: three a parameter and token of the student, forward and backward; one of the teacher."""
    block = trainer.block.batches[0]
    body = layers * (4 * hidden**2 + 3 * 4 * hidden**2)  # parameters of the layers
    head = hidden * VOCABULARY
    tokens = block.completion_mask.sum().item()
    student, teacher = (int((s.segments >= 0).sum()) for s in (block.student, block.teacher))
    return body * (3 * student + teacher) + head * tokens * (3 + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, (hidden, layers) in SIZES.items():
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state()
        GradientState._reset_state()
        with tempfile.TemporaryDirectory() as folder:
            trainer = build(hidden, layers, folder, fsdp=options.fsdp)
            watch = Watch()
            trainer.add_callback(watch)
            number = sum(p.numel() for p in trainer.model.parameters())
            trainer.train()
        cut = WORLD if options.fsdp else 1
        states = [t for state in trainer.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        [(teacher, _)] = trainer.teacher.parts
        trainer.teacher.state_dict()  # cuts up what the last forward pass left whole
        for module in trainer.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        held = {
            "parameters": (size_of(trainer.model.parameters()), 4 * number / cut),
            "gradients": (watch.gradients, 4 * number / cut),
            "optimizer": (size_of(states), 8 * number / cut),
            "teacher": (size_of(teacher.parameters()), 4 * number / cut),
        }
        seconds = statistics.median(e - b for b, e in zip(watch.begins[1:], watch.ends[1:], strict=True))
        work = multiplications(trainer, hidden, layers)
        say = trainer.accelerator.print
        say(f"{name}: {number / 1e6:.1f}M parameters, {WORLD} ranks, {'FSDP2' if options.fsdp else 'DDP or one'}")
        for part, (found, formula) in held.items():
            say(f"  {part:<12} {found / 1e6:9.2f} MB   formula {formula / 1e6:9.2f} MB   ratio {found / formula:.3f}")
        say(
            f"  step {seconds:.3f} s, {work / 1e9:.1f} G multiplications, {work / seconds / 1e9:.1f} G a second",
            flush=True,
        )


if __name__ == "__main__":
    main()
