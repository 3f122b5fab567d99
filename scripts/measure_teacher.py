"""What a teacher costs in memory, and how far the average of LoRA factors is from the average of their product.

    python scripts/measure_teacher.py memory
    python scripts/measure_teacher.py lora --learning_rate 3e-4 --max_steps 14

Both use the demo's model; the second trains it with an adapter on the demo's task, with the demo's settings.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TrainerCallback

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import sdpo_math
from demo_model import embedded_model
from peft import LoraConfig, get_peft_model

from sdpo import SDPOTrainer
from sdpo.teacher import build_teacher
from sdpo.types import TeacherSettings

LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


def megabytes(model: nn.Module, *, without: nn.Module | None = None) -> float:
    """Memory of the parameters that the model does not share with another, in units of 10^6 bytes."""
    shared = {p.data_ptr() for p in without.parameters()} if without is not None else set()
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.data_ptr() not in shared) / 1e6


def measure_memory() -> None:
    print("| student | its parameters, MB | trained, MB | ema adds, MB |\n|---|---|---|---|")
    for name in ("full fine-tuning", "LoRA, rank 16, all linear layers"):
        model: Any = AutoModelForCausalLM.from_pretrained(embedded_model(), dtype=torch.float32)
        if name.startswith("LoRA"):
            model = get_peft_model(model, LoraConfig(**LORA))
        teacher = build_teacher(model, TeacherSettings(kind="ema", update_rate=0.05, sync_steps=1))
        [(part, _)] = teacher.parts
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) / 1e6
        print(f"| {name} | {megabytes(model):.1f} | {trained:.1f} | {megabytes(part, without=model):.1f} |")


def factors(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """(B, A) of every LoRA layer."""
    parameters = dict(model.named_parameters())
    names = [name.removesuffix(".lora_A.default.weight") for name in parameters if "lora_A.default" in name]
    return {n: (parameters[f"{n}.lora_B.default.weight"], parameters[f"{n}.lora_A.default.weight"]) for n in names}


class ProductAverage(TrainerCallback):
    """Moving average of B A itself, beside the teacher's averages of B and of A."""

    def __init__(self, trainer: SDPOTrainer):
        self.trainer = trainer
        self.rate = trainer.args.teacher_update_rate
        self.average = {name: (b @ a).detach().clone() for name, (b, a) in factors(trainer.model).items()}

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, (b, a) in factors(self.trainer.model).items():
            self.average[name].lerp_(b @ a, self.rate)


@torch.no_grad()
def log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    return model.eval()(input_ids=ids).logits.log_softmax(-1)


@torch.no_grad()
def measure_lora(arguments: list[str]) -> None:
    options = {"--use_peft": True, "--lora_r": LORA["r"], "--lora_alpha": LORA["lora_alpha"]}
    words = [str(word) for pair in options.items() for word in pair]
    trainers: list[SDPOTrainer] = []
    averages: list[ProductAverage] = []

    def watch(trainer: SDPOTrainer) -> None:
        trainers.append(trainer)
        averages.append(ProductAverage(trainer))
        trainer.add_callback(averages[0])

    with torch.enable_grad():
        sdpo_math.main([*words, "--lora_target_modules", "all-linear", *arguments], on_trainer=watch)
    [trainer], [average] = trainers, averages
    [(teacher, _)] = trainer.teacher.parts
    gap = scale = moved = 0.0
    for name, (b, a) in factors(teacher).items():
        gap += (b @ a - average.average[name]).square().sum().item()
        scale += average.average[name].square().sum().item()
        student = factors(trainer.model)[name]
        moved += (student[0] @ student[1]).square().sum().item()
    print(f"norm of the difference / norm of the averaged product: {(gap / scale) ** 0.5:.4f}")
    print(f"norm of the averaged product / norm of the student's:  {(scale / moved) ** 0.5:.4f}")
    exact = copy.deepcopy(teacher)
    for name, (b, _) in factors(exact).items():  # the averaged product in the base weight, nothing in the factors
        layer = exact.get_submodule(name)
        layer.base_layer.weight = nn.Parameter(
            layer.base_layer.weight + layer.scaling["default"] * average.average[name], requires_grad=False
        )
        b.zero_()
    prompts = trainer.tokenizer.encode([row["prompt"] for row in trainer.train_dataset.select(range(16))])
    kl = {"teacher, exact product": 0.0, "teacher, student": 0.0}
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mine, other, student = (log_probs(m, ids) for m in (teacher, exact, trainer.model))
        kl["teacher, exact product"] += (mine.exp() * (mine - other)).sum(-1).mean().item() / len(prompts)
        kl["teacher, student"] += (mine.exp() * (mine - student)).sum(-1).mean().item() / len(prompts)
    for pair, value in kl.items():
        print(f"KL({pair}), nats a token on 16 prompts: {value:.3e}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["memory"]:
        measure_memory()
    elif sys.argv[1:2] == ["lora"]:
        measure_lora(sys.argv[2:])
    else:
        sys.exit(__doc__)
