"""Runs of the trainer that one process and several can do alike, by name, and what they leave.

Completions, rewards and prompts depend on a row's place among all ranks' rows, so that any cut into ranks,
accumulation steps and microbatches has the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from conftest import make_model, make_tokenizer
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen2ForCausalLM

from sdpo import SDPOConfig, SDPOTrainer
from sdpo.sharding import gathered
from sdpo.types import Completion

TOKENIZER = make_tokenizer()
TEXTS = (
    *("w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w1 w1"),
    *("w10", "w11 w12 w13 w14 w15 w16", "w17 w18", "w19 w20 w21"),
)
REWARDS: dict[str, float | None] = dict(zip(TEXTS, (1.0, 0.0, 0.5, 0.0, 1.0, 1.0, -1.0, 0.25), strict=True))
REWARDS |= {"": 0.0, "w22 w23": None}
ROWS = len(TEXTS)
HALF = TEXTS[: ROWS // 2]  # what the first of two ranks gets

FSDP2 = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
    "state_dict_type": "FULL_STATE_DICT",
    "reshard_after_forward": True,
}
ZERO = {
    "zero_optimization": {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "up_proj"]}


class ScriptByPrompt:
    """A generator whose completions depend on the prompt alone, as the number in its second word."""

    def sync(self, step: int) -> None:
        pass

    def generate(self, prompt_ids: Sequence[list[int]]) -> list[Completion]:
        words = [TOKENIZER.decode(ids).split()[1] for ids in prompt_ids]
        ids = [TOKENIZER(TEXTS[int(word[1:])], add_special_tokens=False)["input_ids"] for word in words]
        return [Completion([*one, TOKENIZER.eos_token_id], is_truncated=False) for one in ids]


class ScriptByPlace:
    """A generator whose completions depend on the prompt and on how many equal ones stand before it."""

    def sync(self, step: int) -> None:
        pass

    def generate(self, prompt_ids: Sequence[list[int]]) -> list[Completion]:
        found: list[Completion] = []
        number = 0
        for i, ids in enumerate(prompt_ids):
            number = number + 1 if i and prompt_ids[i - 1] == ids else 0
            drawn = TOKENIZER(TEXTS[(sum(ids) + number) % ROWS], add_special_tokens=False)["input_ids"]
            found.append(Completion([*drawn, TOKENIZER.eos_token_id], is_truncated=False))
        return found


class SharedScript:
    """A generator whose completions are those of a script, by the row's place among all ranks' rows."""

    def __init__(self, texts: Sequence[str], *, rank: int, world_size: int):
        self.texts = texts
        self.rank = rank
        self.world_size = world_size
        self.num_given = 0

    def sync(self, step: int) -> None:
        pass

    def generate(self, prompt_ids: Sequence[list[int]]) -> list[Completion]:
        start = self.num_given * self.world_size + self.rank * len(prompt_ids)
        self.num_given += len(prompt_ids)
        texts = [self.texts[(start + i) % len(self.texts)] for i in range(len(prompt_ids))]
        found = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts]
        # An empty text is a completion without any token, cut before its end.
        return [Completion([*ids, TOKENIZER.eos_token_id] if ids else [], is_truncated=not ids) for ids in found]


def reward_by_text(completions: list[str], **_: Any) -> list[float | None]:
    return [REWARDS[text] for text in completions]


@dataclass(frozen=True)
class Case:
    """A run: settings of the trainer, and how the model and the completions are made."""

    settings: dict[str, Any] = field(default_factory=dict)
    num_prompts: int = 2
    texts: Sequence[str] = TEXTS
    tied: bool = False
    lora: dict[str, Any] | None = None
    reward: Any = reward_by_text
    samples: bool = False  # with the model itself, in place of the script
    kind: str = "ddp"
    fsdp: dict[str, Any] = field(default_factory=dict)  # beside those of every run

    def having(self, **changes: Any) -> Case:
        """The same run with other settings."""
        own = {f: changes.pop(f) for f in list(changes) if f in Case.__dataclass_fields__}
        return replace(self, settings={**self.settings, **changes}, **own)


def parallelism(case: Case, world_size: int) -> dict[str, Any]:
    """Settings of `TrainingArguments` for the kind of the case, where there are several ranks."""
    if world_size == 1:
        return {}
    if case.kind == "fsdp2":
        return {"ddp_backend": "gloo", "fsdp": True, "fsdp_config": {**FSDP2, **case.fsdp}}
    if case.kind.startswith("zero"):
        stage = {**ZERO["zero_optimization"], "stage": int(case.kind[-1])}
        return {"deepspeed": {**ZERO, "zero_optimization": stage}}
    return {"ddp_backend": "gloo"}


def arguments(case: Case, folder: Path, *, world_size: int = 1, microbatch: int = ROWS) -> SDPOConfig:
    """The settings of a case on this rank; `microbatch` rows at a time, as often as makes one block of `ROWS`."""
    if not case.kind.startswith("zero"):
        reset()
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": ROWS // world_size // microbatch,
        "num_generations": ROWS // case.num_prompts,
        "max_completion_length": 8,
        "max_steps": 2,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        **parallelism(case, world_size),
        **case.settings,
    }
    args = SDPOConfig(**settings)
    if case.kind == "fsdp2" and world_size > 1:
        # On CPUs accelerate takes FSDP for DDP unless the processes look as if they had GPUs.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return args


def build(
    case: Case, folder: Path, *, world_size: int = 1, microbatch: int = ROWS, model: Any = None, **trainer: Any
) -> SDPOTrainer:
    """The trainer of a case on this rank; `model` in place of the one that all ranks make alike."""
    args = arguments(case, folder, world_size=world_size, microbatch=microbatch)
    model = make_model(TOKENIZER) if model is None else model
    if case.tied:
        model.config.tie_word_embeddings = True
        model = Qwen2ForCausalLM(model.config).float()
    prompts = [f"w{30 + i} w{i} w5" for i in range(case.num_prompts)]
    given = {"train_dataset": Dataset.from_dict({"prompt": prompts}), **trainer}
    made = SDPOTrainer(
        model,
        case.reward,
        args,
        processing_class=TOKENIZER,
        peft_config=None if case.lora is None else LoraConfig(**case.lora),
        **given,
    )
    assert made.accelerator.num_processes == world_size
    assert made.accelerator.is_fsdp2 == (case.kind == "fsdp2" and world_size > 1)
    if not case.samples:
        rank = made.accelerator.process_index
        made.generator = SharedScript(case.texts, rank=rank, world_size=world_size)
    return made


def reset() -> None:
    """Lets the next trainer of this process choose its own kind of parallelism."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP"]:
        del os.environ[name]  # left by accelerate
    if PartialState._shared_state and PartialState().num_processes > 1:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Whole parameters by name. On every rank."""
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        with gathered(model.parameters()):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    found = {name: p.detach() for name, p in model.named_parameters()}
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for n, p in found.items()}


def logs_of(trainer: SDPOTrainer) -> list[dict[str, float]]:
    """What was logged at each step, without times."""
    kept = [log for log in trainer.state.log_history if "loss" in log]
    return [{name: value for name, value in log.items() if not name.startswith("time/")} for log in kept]


def state_of(trainer: SDPOTrainer) -> dict[str, Any]:
    """Weights of student and teacher, and logs. On every rank."""
    found = {f"student {name}": value for name, value in weights_of(trainer.model).items()}
    for number, (part, _) in enumerate(trainer.teacher.parts if trainer.teacher is not None else []):
        found |= {f"teacher {number} {name}": value for name, value in weights_of(part).items()}
    return {"weights": found, "logs": logs_of(trainer)}


def trained(case: Case, folder: Path, **layout: Any) -> dict[str, Any]:
    """What a run of the case leaves."""
    trainer = build(case, folder, **layout)
    trainer.train()
    return state_of(trainer)


FSDP2_VARIANTS: dict[str, dict[str, Any]] = {
    "activation checkpointing": {"activation_checkpointing": True},
    "weights of one rank": {"cpu_ram_efficient_loading": True},
    "whole after the forward pass": {"reshard_after_forward": False},
}

BASE = Case({"distillation_mode": "full_logits"})
BLEND = BASE.having(distillation_weight=0.5)
POLICY = Case({"distillation_weight": 0.0})
REUSED = {"steps_per_generation": None, "num_iterations": 2}

SAME_UPDATE: dict[str, Case] = {
    "sampled token": Case(),
    "full logits": BASE,
    "full logits, Jensen-Shannon": BASE.having(distillation_alpha=0.5),
    "top k": Case({"distillation_mode": "topk_logits", "distillation_topk": 5}),
    "top k with a tail": Case(
        {"distillation_mode": "topk_logits", "distillation_topk": 5, "distillation_add_tail": True}
    ),
    "live teacher": BLEND.having(teacher_model_kind="live"),
    "frozen teacher": BLEND.having(teacher_model_kind="base"),
    "trust region": BLEND.having(teacher_model_kind="trust_region"),
    "dapo": BLEND.having(loss_type="dapo"),
    "grpo": BLEND.having(loss_type="grpo"),
    "dr_grpo": BLEND.having(loss_type="dr_grpo"),
    "policy gradient with a reference": POLICY.having(beta=0.1),
    "policy gradient, scaled by the batch": POLICY.having(scale_rewards="batch"),
    "policy gradient, not scaled": POLICY.having(scale_rewards="none"),
    "reused, token level": BLEND.having(num_iterations=2),
    "reused, sequence level": BLEND.having(num_iterations=2, importance_sampling_level="sequence"),
    "a group over all ranks": BLEND.having(num_prompts=1),
    "tied embeddings": BLEND.having(tied=True),
    "a rank whose teacher knows nothing more": BLEND.having(texts=(*HALF, "w1 w1", "w4 w5", "w1 w1", "w4 w5")),
    "a rank without a reward": BLEND.having(texts=(*HALF, *["w22 w23"] * 4)),
    "a rank with nothing but empty completions": BLEND.having(texts=(*HALF, *[""] * 4)),
    "nothing but empty completions": BLEND.having(texts=("",)),
    "no reward anywhere": BLEND.having(texts=("w22 w23",)),
    "LoRA": BLEND.having(lora=LORA),
    "LoRA on the head": BLEND.having(lora={**LORA, "target_modules": ["q_proj", "lm_head"]}),
    "LoRA on the head alone": BLEND.having(lora={**LORA, "target_modules": ["lm_head"]}),
}
