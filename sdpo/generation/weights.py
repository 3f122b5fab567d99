"""The weights of the trained policy, under the names that an inference engine knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel, is_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from sdpo.sharding import gathered, reshard

# Wrappers of torch that stand between a module and its parent: of torch.compile, and of activation checkpointing.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def engine_weights(model: nn.Module, *, is_merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of every parameter of the base model, adapters merged if so asked, one after the other.

    Names are those of `named_parameters()` of the plain transformers model; a tied weight comes once. Buffers that a
    checkpoint holds are among them: an engine that starts without a checkpoint has them from here alone. Tensors are
    whole, detached, and where the model is. An adapted layer is merged on a copy, so at most one layer exists twice,
    a tensor keeps its values after the next one is taken, and the model is as it was whenever a tensor is handed out.

    With sharded parameters (FSDP2, DeepSpeed ZeRO-3) every rank has to iterate to the end: each tensor is gathered.

    Raises:
        ValueError: As `check_engine_can_hold`, at the call; and where an adapted layer cannot be merged.
    """
    check_engine_can_hold(model)
    reshard(model)  # what a forward pass has left whole may be rounded to the precision of that pass
    return _weights(_unwrapped(model), is_merged=is_merged)


def lora_factors(model: nn.Module) -> dict[str, Tensor]:
    """Name -> factor A or B of the LoRA in use on each layer, in memory of the CPU, the scale multiplied into B.

    Names are those of PEFT's files. Several adapters in use are one of the sum of their ranks. As in `engine_weights`,
    every rank gathers.

    Raises:
        ValueError: more is trained than these factors, or their product is not what is added to a layer.
    """
    from peft.tuners.lora import Linear

    reshard(model)
    policy = _unwrapped(model)
    found: dict[str, Tensor] = {}
    sent: set[int] = set()
    for name, part, is_adapted in _parts(policy):
        if not is_adapted or not isinstance(part, Linear) or part.lora_variant:
            continue
        active = [one for one in part.active_adapters if one in part.lora_A and one not in part.merged_adapters]
        if active and not part.disable_adapters:
            ins, outs = [part.lora_A[one].weight for one in active], [part.lora_B[one].weight for one in active]
            sent.update(id(factor) for factor in (*ins, *outs))
            scaled = [_alone(factor) * part.scaling[one] for one, factor in zip(active, outs, strict=True)]
            prefix = f"base_model.model.{_engine_name(name)}lora_"
            found[f"{prefix}A.weight"] = torch.cat([_alone(factor) for factor in ins]).cpu()
            found[f"{prefix}B.weight"] = torch.cat(scaled, dim=1).cpu()
    left = [name for name, p in policy.named_parameters() if p.requires_grad and id(p) not in sent]
    if left or not found:
        reason = f"{left[0]} is trained besides" if left else "the policy has none"
        raise ValueError(
            f"vllm_lora_as_adapter=True sends plain LoRA on linear layers and nothing else, and {reason}. Set it to "
            "False to send the merged weights."
        )
    return found


def describe(weights: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str, list[int]]]:
    """(name, dtype as in "bfloat16", shape) of each weight."""
    return [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in weights]


def check_engine_can_hold(model: nn.Module) -> None:
    """Nothing, if the weights of a model say all about the policy to an engine that knows the plain base model.

    Raises:
        ValueError: The adapter is no change of weights, the weights are quantized, or input and output embeddings
            differ although `config.tie_word_embeddings` says that they are one.
    """
    policy = _unwrapped(model)
    if is_peft_model(policy):
        config = policy.active_peft_config
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise _cannot_merge(f"{config.peft_type.value} adds to what the model reads and not to its weights")
        if getattr(config, "layer_replication", None):
            raise _cannot_merge("layer_replication makes layers that the base model does not have")
    plain: Any = _plain(policy)
    parts = list(_parts(policy))
    if getattr(plain, "is_quantized", False) or any(not p.is_floating_point() for p in plain.parameters()):
        raise ValueError(
            "vLLM cannot be given weights that are quantized here: an adapter cannot be merged into them exactly. "
            "Load the model without quantization_config (load_in_4bit, load_in_8bit), or set use_vllm=False."
        )
    sent = {id(p) for _, part, is_adapted in parts for p in part.parameters(recurse=is_adapted)}
    left = [name for name, p in policy.named_parameters() if p.requires_grad and id(p) not in sent]
    if left:
        raise _cannot_merge(f"{left[0]} is trained and belongs to no layer of the base model")
    _check_tied(plain, _peft_types(policy))


def _cannot_merge(reason: str) -> ValueError:
    return ValueError(
        f"vLLM cannot be given this type of adapter, since it cannot be merged into the weights: {reason}. Set "
        "use_vllm=False to sample with transformers, or use an adapter that can be merged, such as LoRA."
    )


def _check_tied(plain: Any, types: _PeftTypes) -> None:
    """Nothing, if input and output embeddings are one, or the config does not say so.

    Raises:
        ValueError: They are not made of the same memory, so training moves them apart.
    """
    output = plain.get_output_embeddings()
    if not getattr(plain.config, "tie_word_embeddings", False) or output is None:
        return
    inputs, outputs = (_resolved(module, types) for module in (plain.get_input_embeddings(), output))
    if {_memory(p) for p in inputs.parameters()} != {_memory(p) for p in outputs.parameters()}:
        raise ValueError(
            "config.tie_word_embeddings is True, so vLLM holds input and output embeddings as one tensor, but in this "
            "model they are trained apart (modules_to_save or an adapter on one of them, as a rule). Adapt neither or "
            "both as one: LoraConfig(modules_to_save=['embed_tokens'], ensure_weight_tying=True); or set "
            "tie_word_embeddings=False and give the output embeddings a copy of the weights before the adapter is "
            "added, in a checkpoint that vLLM reads as well; or set use_vllm=False."
        )


def _memory(param: Tensor) -> int:
    """What two parameters have in common if they are the same values and stay so."""
    return _local(param).untyped_storage().data_ptr() or id(param)  # ZeRO-3 leaves a parameter empty between its uses


def _unwrapped(model: nn.Module) -> Any:
    """The transformers or PEFT model inside DDP, DeepSpeed and torch.compile, in whatever order they are."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner if inner is model else _unwrapped(inner)


def _plain(model: Any) -> PreTrainedModel:
    """The transformers model; adapters may be in it."""
    return _unwrapped(model.get_base_model()) if is_peft_model(model) else model


_PeftTypes = tuple[Any, Any, Any]  # layers with an adapter, wrappers of saved modules, wrappers of trained tokens


def _peft_types(model: Any) -> _PeftTypes:
    """Classes of PEFT that change a module; none, without an import, where the model has no adapter."""
    if not is_peft_model(model) and not getattr(model, "_hf_peft_config_loaded", False):
        return (), (), ()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    return BaseTunerLayer, ModulesToSaveWrapper, TrainableTokensWrapper


def _parts(model: Any) -> Iterator[tuple[str, nn.Module, bool]]:
    """(name in the plain model, module, whether it is a layer with an adapter), parents first.

    A layer with an adapter is one part, with all that is in it. Of any other module only its own parameters count.
    """
    types = _peft_types(model)

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, bool]]:
        module = _resolved(module, types)
        is_adapted = isinstance(module, types[0])
        yield name, module, is_adapted
        if not is_adapted:
            for child_name, child in module.named_children():
                yield from walk(child, f"{name}{child_name}.")

    return walk(_plain(model), "")


def _resolved(module: nn.Module, types: _PeftTypes) -> nn.Module:
    """The module that computes in place of a wrapper: the saved copy in use, the layer of the trained tokens."""
    _, saved, tokens = types
    for name, child in module.named_children():
        if name in _WRAPPERS:
            return _resolved(child, types)
    wrapper: Any = module
    if isinstance(wrapper, saved):
        active = [] if wrapper.disable_adapters else wrapper.active_adapters
        copies = [wrapper.modules_to_save[name] for name in active if name in wrapper.modules_to_save]
        return _resolved(copies[0] if copies else wrapper.original_module, types)
    return wrapper.token_adapter if isinstance(wrapper, tokens) else module


def _weights(model: nn.Module, *, is_merged: bool) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for prefix, part, is_adapted in _parts(model):
        holder: Any = part.get_base_layer() if is_adapted else part  # type: ignore[operator]
        held = [*holder.named_parameters(recurse=is_adapted), *_saved_buffers(holder, recurse=is_adapted)]
        own = [(name, tensor) for name, tensor in held if id(tensor) not in seen]
        seen.update(id(p) for _, p in own)
        names = [_engine_name(prefix + name) for name, _ in own]
        # In no variable, so that no tensor is kept here while the next one is made.
        if is_adapted and own and is_merged:
            yield from zip(names, _merged(part, [name for name, _ in own]), strict=True)
        else:
            yield from zip(names, (_alone(p) for _, p in own), strict=True)


def _saved_buffers(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    """Buffers with their names that are in a checkpoint."""
    for prefix, part in module.named_modules() if recurse else [("", module)]:
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _engine_name(name: str) -> str:
    return ".".join(step for step in name.split(".") if step not in _WRAPPERS)


@torch.no_grad()
def _merged(layer: Any, names: list[str]) -> list[Tensor]:
    """Parameters of the base layer, by name in it, with the adapters in use merged. The layer is as before after it.

    Raises:
        ValueError: An adapter of this type cannot be merged.
    """
    state = _state(layer)
    with gathered(layer.parameters()):
        try:
            _put_copies(layer)
            for tuner in reversed(list(_tuners(layer))):
                active = [name for name in tuner.active_adapters if name not in tuner.merged_adapters]
                if active and not tuner.disable_adapters:
                    tuner.merge(adapter_names=active)
            return [attrgetter(name)(layer.get_base_layer()).detach() for name in names]
        except NotImplementedError as error:
            raise _cannot_merge(str(error) or type(layer).__name__) from error
        finally:
            for container, content in state:
                container.clear()
                (container.update if isinstance(container, dict) else container.extend)(content)


def _tuners(layer: Any) -> Iterator[Any]:
    """The adapters on a base layer, from the outermost one."""
    base = layer.get_base_layer()
    while layer is not base:
        yield layer
        layer = layer.base_layer


def _state(layer: nn.Module) -> list[tuple[Any, Any]]:
    """(container, shallow copy of it): every dict and list that the modules of a layer hold, their attributes first.

    They say which tensors and submodules the layer is made of, and which adapters are merged.
    """
    attributes = [vars(module) for module in layer.modules()]
    held = [value for mapping in attributes for value in mapping.values() if isinstance(value, dict | list)]
    containers = attributes + held
    return [(c, dict(c) if isinstance(c, dict) else list(c)) for c in containers]


def _put_copies(layer: Any) -> None:
    """Puts whole copies in the place of the base layer's parameters, and of all that are sharded."""
    base = {id(p) for p in layer.get_base_layer().parameters()}
    for module in layer.modules():
        for name, param in module._parameters.items():
            if param is not None and (id(param) in base or _is_dtensor(param)):
                whole = _whole(param)
                is_shared = whole.untyped_storage().data_ptr() == _local(param).untyped_storage().data_ptr()
                module._parameters[name] = nn.Parameter(whole.clone() if is_shared else whole, requires_grad=False)


def _alone(param: Any) -> Tensor:
    """All values of a parameter that may be sharded in any way, detached."""
    with gathered([param]) as is_cut:
        return _whole(param).clone() if is_cut else _whole(param)


def _whole(param: Any) -> Tensor:
    """All values of a parameter, detached. They share its memory where it is not sharded by FSDP2."""
    return param.detach().full_tensor() if _is_dtensor(param) else param.detach()


def _local(param: Any) -> Tensor:
    """What this process has of a parameter, detached."""
    return param.detach().to_local() if _is_dtensor(param) else param.detach()


def _is_dtensor(param: Tensor) -> bool:
    # By what it can do: torch.distributed is sdpo.distributed's to import.
    return hasattr(param, "full_tensor")
