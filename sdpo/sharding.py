"""Parameters that are cut up over the ranks (FSDP2, DeepSpeed ZeRO-3): made whole, copied, and read piece by piece.

What is said to be done on every rank sends parameters between them. A model that is not cut up goes through all of
this unchanged.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn


class StoppedHalfway(RuntimeError):
    """Something that the ranks do together has stopped on this one.

    The others wait in it, so this rank can tell them nothing: it ends, and the launcher ends the others.
    """


@contextmanager
def done_together(is_together: bool = True) -> Iterator[None]:
    """What is inside is one thing of all ranks, whose errors are `StoppedHalfway`."""
    try:
        yield
    except Exception as error:
        if not is_together:
            raise
        raise StoppedHalfway(f"{type(error).__name__}: {error}") from error


def check_placement(accelerator: Accelerator, args: Any) -> None:
    """Makes sure that the processes train one model together, in a way that is known here.

    Raises:
        ValueError: every process would train alone; FSDP that accelerate does not act on, or its first version; ranks
            that share a sample.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != accelerator.num_processes:
        raise ValueError(
            f"{started} processes were started (WORLD_SIZE), but accelerate knows of {accelerator.num_processes}: "
            "each would train alone. Without GPUs, set use_cpu=True."
        )
    if parallelism_of(args) == "fsdp" and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            f"FSDP is asked for, but accelerate runs this as {accelerator.distributed_type.value}, every process with "
            "the whole model. FSDP needs several processes with an accelerator each; leave fsdp out."
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version != 2:
        raise ValueError(
            f"FSDP version {plugin.fsdp_version} is not supported: it keeps a layer's parameters as one flat tensor. "
            "Set fsdp_version: 2 in the accelerate config, or fsdp_config={'version': 2}."
        )
    parallel = getattr(accelerator, "parallelism_config", None)
    for kind in ("tp", "cp", "sp") if parallel is not None else ():
        if (size := getattr(parallel, f"{kind}_size", 1)) > 1:
            raise ValueError(
                f"parallelism_config with {kind}_size={size} is not supported: every rank trains on completions of "
                "its own. Use data parallelism (DDP, FSDP2, DeepSpeed ZeRO)."
            )


def parallelism_of(args: Any) -> str:
    """How the processes share the model, as asked for: "ddp" (also for one process), "fsdp", or "zero" and a stage."""
    if args.deepspeed_plugin is not None:
        return f"zero{args.deepspeed_plugin.zero_stage}"
    is_fsdp = args.fsdp_plugin_args is not None or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return "fsdp" if is_fsdp else "ddp"


def is_sharded(model: nn.Module) -> bool:
    """Whether a rank holds a part of the parameters only."""
    return bool(_fsdp_modules(model)) or any(hasattr(p, "ds_id") for p in model.parameters())


def _fsdp_modules(model: nn.Module) -> list[Any]:
    """Modules whose parameters FSDP2 cuts up; those of a module are its own, without those of modules in it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _owners(model: nn.Module, module: nn.Module) -> list[Any]:
    """The FSDP2 modules that hold the parameters of a module of a model."""
    fsdp = {id(m): m for m in _fsdp_modules(model)}
    if not fsdp:
        return []
    inside = [m for m in module.modules() if id(m) in fsdp]
    if inside[:1] == [module]:
        return inside
    name = next(name for name, m in model.named_modules() if m is module)
    steps = name.split(".")
    above = (model.get_submodule(".".join(steps[:length])) for length in range(len(steps) - 1, -1, -1))
    return [next(m for m in above if id(m) in fsdp), *inside]


@contextmanager
def whole(heads: Iterable[tuple[nn.Module, nn.Module]]) -> Iterator[None]:
    """Inside, the parameters of modules, each given with its model, are whole. On every rank.

    FSDP2 leaves them so until the backward pass has gone through them, or `reshard`; ZeRO-3 cuts them up again.
    """
    pairs = list(heads)
    for model, module in pairs:
        for owner in _owners(model, module):
            owner.unshard()
    with gathered(p for _, module in pairs for p in module.parameters()):
        yield


def whole_in_backward(anchor: Tensor, module: nn.Module) -> Tensor:
    """The anchor (0-dim) of a loss; ZeRO-3 gathers the module's parameters when its backward pass begins.

    A gradient is taken by a parameter of its own shape only, and DeepSpeed gathers for what goes through the module's
    output.
    """
    cut = [p for p in module.parameters() if hasattr(p, "ds_id") and p.requires_grad]
    found: Tensor = _Gathering.apply(anchor, cut) if cut else anchor
    return found


class _Gathering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, cut: list[Any]) -> Tensor:
        ctx.cut = cut
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        cut = ctx.cut
        cut[0].all_gather(param_list=cut)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _cut_again(cut))
        return gradient, None


def _cut_again(params: list[Any]) -> None:
    """Cuts up what no module uses any more; DeepSpeed does it for those of a module in use, as a tied embedding."""
    idle = [p for p in params if not p.ds_active_sub_modules]
    if idle:
        idle[0].partition(param_list=idle)


@contextmanager
def whole_model(model: nn.Module, accelerator: Accelerator) -> Iterator[Any]:
    """Inside, all of a model is whole: the unwrapped model, whose forward sends nothing. On every rank."""
    unwrapped = accelerator.unwrap_model(model)
    modules = _fsdp_modules(unwrapped)
    with gathered(model.parameters()) as is_cut, _without_hooks(model, is_cut):
        with done_together():
            for module in modules:
                module.set_reshard_after_forward(False, recurse=False)
                module.unshard()
        try:
            yield unwrapped
        finally:
            if modules:
                _set_resharding(unwrapped, modules, accelerator)
                reshard(unwrapped)


@contextmanager
def _without_hooks(model: Any, is_cut: bool) -> Iterator[None]:
    """Inside, DeepSpeed ZeRO-3 does not cut up each module of a model after its forward."""
    if not is_cut:
        yield
        return
    from trl.models.utils import add_hooks, remove_hooks

    remove_hooks(model)
    try:
        yield
    finally:
        add_hooks(model)


def _set_resharding(model: Any, modules: Sequence[Any], accelerator: Accelerator) -> None:
    """What accelerate sets: layers as the plugin says, the root and the output head whole until the backward pass."""
    for module in modules:
        module.set_reshard_after_forward(accelerator.state.fsdp_plugin.reshard_after_forward, recurse=False)
    for module in [model, *_owners(model, model.get_output_embeddings())]:
        module.set_reshard_after_forward(False, recurse=False)


def reshard(model: nn.Module) -> None:
    """Cuts up what FSDP2 has left whole, so that the parameters are those which are trained and saved."""
    for module in _fsdp_modules(model):
        module.reshard()


@contextmanager
def loaded_whole(args: Any) -> Iterator[None]:
    """Inside, transformers loads every rank a whole model, also where ZeRO-3 would have it cut up at once.

    Teacher and reference are copies of the student, made before all three are cut up.
    """
    held = getattr(args, "hf_deepspeed_config", None) or getattr(args.deepspeed_plugin, "dschf", None)
    if held is None:
        yield
        return
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(held)


def place_copy(model: nn.Module, student: nn.Module, accelerator: Accelerator) -> Any:
    """Cuts up a copy of the student as the student itself is or will be, in place; what has to live as long as it.

    On every rank. Parameters that it shares with the student become its own pieces of them.
    """
    if accelerator.is_fsdp2:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        if not _fsdp_modules(model):
            _own_shared(model, student)
            fsdp2_prepare_model(accelerator, model)
    elif accelerator.distributed_type == DistributedType.DEEPSPEED:
        return _place_with_deepspeed(model, accelerator)
    return None


def _place_with_deepspeed(model: nn.Module, accelerator: Accelerator) -> Any:
    """The engine of a copy that has no optimizer; below ZeRO-3 a copy is whole, and there is none."""
    config = _without_auto(accelerator.state.deepspeed_plugin.deepspeed_config)
    if config["zero_optimization"]["stage"] < 3:
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
        model.to(accelerator.device, half)
        return None
    import deepspeed

    for part in ("optimizer", "scheduler"):
        config.pop(part, None)
    config["zero_optimization"].pop("offload_optimizer", None)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # what is written to its pieces is all of it
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a DeepSpeed config, with DeepSpeed's defaults for what is left to the Trainer (sizes of buckets)."""
    values = {name: _without_auto(value) if isinstance(value, dict) else value for name, value in config.items()}
    return copy.deepcopy({name: value for name, value in values.items() if value != "auto"})


def _own_shared(model: nn.Module, student: nn.Module) -> None:
    """Gives a copy parameters of its own for those it shares: they would go to the device whole, as the student's."""
    shared = {id(p) for p in student.parameters()}
    own: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in shared:
                if id(parameter) not in own:
                    own[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                module._parameters[name] = own[id(parameter)]


def local(tensor: Any) -> Tensor:
    """What this rank holds of a parameter, detached; it shares the parameter's memory."""
    if hasattr(tensor, "ds_id"):
        piece: Tensor = tensor.ds_tensor
        return piece
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def gathered(params: Iterable[Any]) -> Iterator[bool]:
    """Inside, parameters that DeepSpeed ZeRO-3 has cut up are whole. Whether there are any; others are left alone."""
    cut = [p for p in params if hasattr(p, "ds_id")]  # the same one may be there twice
    if not cut:
        yield False
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(cut):
        yield True
