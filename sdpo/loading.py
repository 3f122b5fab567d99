"""The policy and its tokenizer, from whatever the user passed."""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from sdpo.config import SDPOConfig
from sdpo.reprompt import copy_containers
from sdpo.types import RepromptSettings

logger = logging.get_logger(__name__)


def load_policy(model: Any, args: SDPOConfig, *, peft_config: Any | None) -> nn.Module:
    """The student: loaded from a path or id, or as passed, with a new adapter where `peft_config` asks for one.

    A model given by name is loaded in float32 unless `model_init_kwargs` names a dtype.

    Raises:
        ValueError: `model_init_kwargs` with a model instance, `peft_config` with a model that has an adapter, or a
            model that is cut up already.
        TypeError: `model` or `peft_config` is of another kind.
    """
    if isinstance(model, str | os.PathLike):
        kwargs = model_loading_kwargs(args)
        kwargs.setdefault("dtype", kwargs.pop("torch_dtype", "float32"))  # an older name of the same argument
        model = AutoModelForCausalLM.from_pretrained(os.fspath(model), **kwargs)
    elif not isinstance(model, PreTrainedModel) and not (isinstance(model, nn.Module) and is_peft_model(model)):
        raise TypeError(f"model must be a path, an id, a PreTrainedModel or a PeftModel, got {type(model).__name__}.")
    elif args.model_init_kwargs:
        raise ValueError(
            f"model_init_kwargs={args.model_init_kwargs} cannot act on a model that is already loaded. Pass the "
            "model's path or id, or leave model_init_kwargs out."
        )
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        raise ValueError(
            "The model was cut up by DeepSpeed ZeRO-3 while it was loaded, and the teacher is a copy of a whole one. "
            "Pass its path or id instead, or load it before SDPOConfig is made and with zero3_init_flag: false."
        )
    if peft_config is not None:
        model = _add_adapter(model, peft_config)
    if args.disable_dropout:
        zero_dropout(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "The model has no trainable parameter. Pass peft_config, unfreeze some, or load an adapter for training: "
            "PeftModel.from_pretrained(model, path, is_trainable=True)."
        )
    policy: nn.Module = model
    return policy


def zero_dropout(model: nn.Module) -> None:
    """Sets every dropout rate of the model to 0.

    That is the rate of a dropout module, any number called dropout, pdrop or layerdrop that a module hands to a
    function (itself or, as some adapters do, in a dictionary), and those that its forward looks up in its config. The
    rest of the config stays, since it is saved with the model.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if _is_rate(name, value):
                setattr(module, name, 0.0)
            elif isinstance(value, dict):
                value.update({key: 0.0 for key, rate in value.items() if _is_rate(name, rate)})
        config = vars(module).get("config")
        for name in _rates_looked_up(type(module).forward) if config is not None else ():
            if _is_rate(name, getattr(config, name, None)):
                setattr(config, name, 0.0)


@functools.cache
def _rates_looked_up(forward: Any) -> frozenset[str]:
    """Names of dropout rates that the forward of a class reads from its config, as Falcon's layers do."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    steps = [] if code is None else list(dis.get_instructions(code))
    pairs = [(owner.argval, name.argval) for owner, name in pairwise(steps)]
    return frozenset(name for owner, name in pairs if owner == "config" and isinstance(name, str) and "drop" in name)


def _is_rate(name: str, value: Any) -> bool:
    return isinstance(value, float) and "drop" in name


def model_loading_kwargs(args: SDPOConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained`; a new dictionary, `args.model_init_kwargs` stays as it is."""
    return {"trust_remote_code": args.trust_remote_code, **as_dict(args.model_init_kwargs)}


def as_dict(value: Any) -> dict[str, Any]:
    """A dictionary of its own, also where it holds others; empty for None."""
    copied: dict[str, Any] = copy_containers(dict(value or {}))
    return copied


def _add_adapter(model: Any, peft_config: Any) -> Any:
    from peft import PeftConfig, get_peft_model, prepare_model_for_kbit_training  # an optional path: imported late

    if not isinstance(peft_config, PeftConfig):
        raise TypeError(f"peft_config must be a peft.PeftConfig such as LoraConfig, got {type(peft_config).__name__}.")
    if is_peft_model(model):
        raise ValueError(
            "The model already carries an adapter, and peft_config asks for another. Pass one of the two, or merge "
            "the adapter first (model.merge_and_unload())."
        )
    if getattr(model, "quantization_method", None) is not None:
        model = prepare_model_for_kbit_training(model)
    return get_peft_model(model, peft_config)


def load_processing_class(model: Any, args: SDPOConfig) -> Any:
    """The tokenizer (or processor) that belongs to the model, at the same revision."""
    return AutoProcessor.from_pretrained(
        model.config._name_or_path,
        revision=as_dict(args.model_init_kwargs).get("revision", "main"),
        trust_remote_code=args.trust_remote_code,
    )


def check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, *, topk: int | None) -> None:
    """Makes sure that model and tokenizer speak the same ids.

    Raises:
        ValueError: the tokenizer has more tokens than the model has embeddings, or the support is larger than them.
    """
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values())
    if largest >= num_embeddings:
        raise ValueError(
            f"The tokenizer's largest id is {largest}, but the model has embeddings for {num_embeddings} tokens. Pass "
            "the tokenizer that belongs to the model, or call model.resize_token_embeddings(len(tokenizer))."
        )
    if topk is not None and topk > num_embeddings:
        raise ValueError(f"distillation_topk={topk} is more than the model's {num_embeddings} tokens; lower it.")


def check_launch(args: SDPOConfig) -> None:
    """Makes sure that the run is one that this library can do, before anything is loaded.

    Raises:
        ValueError: several devices in one process, a batch size that changes during the run.
        ImportError: vLLM is asked for and not installed.
    """
    if args.use_vllm and importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "use_vllm=True needs vLLM, which is not installed: pip install 'sdpo[vllm]'; or set use_vllm=False."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} devices in one process (nn.DataParallel) are not supported. Start one process a device: "
            "accelerate launch or torchrun; or set CUDA_VISIBLE_DEVICES to one device."
        )
    if args.save_only_model and args.save_strategy != "no":
        logger.warning(
            "save_only_model=True: checkpoints hold no teacher, generation block, optimizer or "
            "random state, so this run cannot be resumed from them."
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True would change the batch under a generation block. Set it to False and choose "
            f"per_device_train_batch_size (now {args.per_device_train_batch_size}) yourself."
        )


def reprompt_settings(model: Any, args: SDPOConfig) -> RepromptSettings:
    """How teacher prompts are made, their length held within the positions that the model has beside a completion."""
    settings = args.reprompt
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return settings
    asked = 1 if args.use_teacher_server else 0  # vLLM scores a prompt only where it also draws a token
    room = max(1, positions - args.objective.max_completion_length - asked)
    return replace(settings, max_reprompt_len=min(settings.max_reprompt_len, room))
