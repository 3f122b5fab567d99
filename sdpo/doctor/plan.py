"""A config file, and what the run that it describes would cost."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM
from trl import ModelConfig, TrlParser, get_peft_config

from sdpo.config import SDPOConfig
from sdpo.config_rules import NAMES_ELSEWHERE
from sdpo.doctor import cost


class ConfigError(ValueError):
    """The run cannot be started with these settings."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a config file. `others`: keys that neither SDPOConfig nor ModelConfig has, left to the script."""

    config: SDPOConfig
    model: ModelConfig
    others: list[str]
    warnings: list[str]


def read_plan(path: Path, *, num_processes: int) -> Plan:
    """The settings, for a launch of so many processes.

    Raises:
        ConfigError: the file, a value in it, or two of them together make a run impossible; with the settings' own
            words.
    """
    values = _read_yaml(path)
    ours = {f.name for cls in (SDPOConfig, ModelConfig) for f in fields(cls) if f.init}
    others = sorted(name for name in values if name not in ours and name != "env")
    for name in others:
        if name in NAMES_ELSEWHERE:
            raise ConfigError(f"SDPOConfig has no field `{name}`: did you mean {NAMES_ELSEWHERE[name]}?")
    known = {name: value for name, value in values.items() if name in ours}
    known.setdefault("output_dir", "trainer_output")
    # HfArgumentParser reads a dataclass; its number of processes would be that of this process's own launch.
    planned = type("SDPOConfig", (SDPOConfig,), {"world_size": property(lambda _: num_processes)})
    parser = TrlParser((planned, ModelConfig))
    said = StringIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with redirect_stderr(said):
                parser.set_defaults_with_config(**known)
                config, model = parser.parse_args_into_dataclasses(args=[], look_for_args_file=False)
        except SystemExit:  # argparse: a value that is no number, or no choice
            raise ConfigError(said.getvalue().strip().splitlines()[-1]) from None
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(str(error)) from error
    told = [str(warning.message) for warning in caught]
    for name in others:
        if close := difflib.get_close_matches(name, ours, n=1, cutoff=0.85):
            told.append(f"`{name}` is left to your script; did you mean `{close[0]}`?")
    return Plan(config, model, others, told)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings: a mapping of names to values is needed.")
    return values


def schedule_of(config: SDPOConfig, *, num_prompts: int | None) -> cost.Schedule:
    """Steps and samples of the run."""
    return cost.schedule(
        completions_per_block=int(config.generation_batch_size or 0),
        num_generations=config.num_generations,
        steps_per_generation=int(config.steps_per_generation or 0),
        num_iterations=config.num_iterations,
        accumulation_steps=config.gradient_accumulation_steps,
        max_steps=config.max_steps,
        num_epochs=config.num_train_epochs,
        num_prompts=num_prompts,
        drop_last=config.dataloader_drop_last,
    )


def memory_of(plan: Plan, *, num_processes: int) -> cost.Memory | None:
    """Memory of one process; None where the file names no model.

    Raises:
        ConfigError: the adapter does not fit the model.
        OSError: the model's own configuration cannot be read.
    """
    if plan.model.model_name_or_path is None:
        return None
    config = plan.config
    shape = _shape_of(plan)
    length = config.objective.max_completion_length
    narrow = 2 if config.bf16 or config.fp16 else shape.itemsize
    prompt = config.max_prompt_length or 1024
    return cost.memory(
        shape,
        cost.Load(
            block_rows=int(config.generation_batch_size or 0) // num_processes,
            batch_rows=config.per_device_train_batch_size,
            prompt_length=prompt,
            # A demonstration is at most a completion long; feedback and templates come on top.
            teacher_prompt_length=min(config.max_reprompt_len, prompt + length + 256),
            completion_length=length,
        ),
        optimizer=str(getattr(config.optim, "value", config.optim)),
        teacher=config.teacher_model_kind if config.distillation_weight > 0 else None,
        teacher_itemsize=None if config.teacher.dtype is None else config.teacher.dtype.itemsize,
        has_reference=config.beta > 0,
        is_checkpointed=bool(config.gradient_checkpointing),
        activation_itemsize=narrow,
        is_sampled_elsewhere=config.use_vllm,
        is_on_cpu=config.use_cpu,
    )


def _shape_of(plan: Plan) -> cost.ModelShape:
    """The model without its weights: its configuration is read, and its modules are made on no device."""
    name = plan.model.model_name_or_path
    kwargs = {"revision": plan.model.model_revision, "trust_remote_code": plan.config.trust_remote_code}
    settings = AutoConfig.from_pretrained(name, **kwargs)
    itemsize = _itemsize(plan)
    with _quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, trust_remote_code=plan.config.trust_remote_code)
        peft_config = get_peft_config(plan.model)
        if peft_config is not None:
            from peft import get_peft_model

            try:
                model = get_peft_model(model, peft_config)
            except ValueError as error:
                raise ConfigError(str(error)) from error
    text = settings.get_text_config()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    head = model.get_output_embeddings()
    return cost.ModelShape(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        itemsize=itemsize,
        trained_itemsize=itemsize if peft_config is None else 4,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        key_value_size=head_size * (getattr(text, "num_key_value_heads", None) or heads),
        vocabulary_size=head.weight.shape[0],
        is_head_trained=any(p.requires_grad for p in head.parameters()),
    )


def _itemsize(plan: Plan) -> int:
    """Bytes of a weight. A model given by name is loaded in float32 unless a dtype is named."""
    kwargs = plan.config.model_init_kwargs
    named = kwargs.get("dtype") if isinstance(kwargs, dict) else None
    dtype = named or plan.model.dtype or "float32"
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), torch.float32)
    return int(found.itemsize)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what libraries say about a model that has no weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
