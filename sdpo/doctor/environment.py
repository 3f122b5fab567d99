"""Versions, devices, and which backends work here."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import psutil
import torch
from packaging.requirements import Requirement

from sdpo import distributed

# Distribution -> the module that it is imported as.
REQUIRED: Mapping[str, str] = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "datasets": "datasets",
    "peft": "peft",
    "trl": "trl",
    "pyarrow": "pyarrow",
    "rich": "rich",
}
OPTIONAL: Mapping[str, str] = {
    "vllm": "vllm",
    "bitsandbytes": "bitsandbytes",
    "deepspeed": "deepspeed",
    "flash-attn": "flash_attn",
    "math-verify": "math_verify",
    "reasoning-gym": "reasoning_gym",
    "py3langid": "py3langid",
    "httpx2": "httpx2",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
}
IMPORT_SECONDS = 180


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution, its version (None: not installed), the range asked for, and whether the version is in it."""

    name: str
    version: str | None
    wanted: str
    is_in_range: bool


@dataclass(frozen=True, slots=True)
class Device:
    """A device and its memory in bytes, None where that is not known."""

    name: str
    note: str
    memory: int | None


@dataclass(frozen=True, slots=True)
class Backend:
    """Whether a part of the library works here, and why or why not."""

    name: str
    works: bool
    reason: str


def wanted_ranges() -> dict[str, Requirement]:
    """What the installed library asks for, extras included; empty for a copy that is not installed."""
    try:
        lines = metadata.requires("sdpo") or []
    except metadata.PackageNotFoundError:
        return {}
    found = [Requirement(line) for line in lines]
    return {requirement.name: requirement for requirement in found}


def packages() -> list[Package]:
    """The distributions that the library uses."""
    wanted = wanted_ranges()
    found = []
    for name in (*REQUIRED, *OPTIONAL):
        try:
            version: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        requirement = wanted.get(name)
        in_range = requirement is None or version is None or requirement.specifier.contains(version, prereleases=True)
        found.append(Package(name, version, str(requirement.specifier) if requirement else "", in_range))
    return found


def devices() -> list[Device]:
    """Processor and accelerators."""
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [Device(platform.processor() or platform.machine(), f"{cores} cores", memory.total)]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            bf16 = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16"
            note = f"compute capability {properties.major}.{properties.minor}, {bf16}"
            found.append(Device(properties.name, note, properties.total_memory))
    elif torch.backends.mps.is_available():
        found.append(Device("Apple GPU", "mps, shares the memory of the processor", None))
    return found


def import_error(module: str) -> str | None:
    """Why a module cannot be imported, in one line; None where it can.

    In a process of its own: a broken extension can end the process that imports it.
    """
    command = [sys.executable, "-c", f"import {module}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"importing it takes more than {IMPORT_SECONDS} s"
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else f"importing it ends the process with status {result.returncode}"


def backends(found: Mapping[str, Package], *, try_import: Callable[[str], str | None] = import_error) -> list[Backend]:
    """What works of that which settings may ask for."""
    has_cuda = torch.cuda.is_available()
    why_not: dict[str, str] = {}
    for name, module in {**REQUIRED, **OPTIONAL}.items():
        if found[name].version is None and find_spec(module) is None:
            why_not[name] = "not installed"
        elif (error := try_import(module)) is not None:
            why_not[name] = error

    def backend(label: str, *needs: str, note: str = "", blocked: str | None = None) -> Backend:
        missing = [f"{name}: {why_not[name]}" for name in needs if name in why_not]
        missing += [blocked] if blocked and not missing else []
        outside = [
            f"{name} {found[name].version} is outside {found[name].wanted}, which has been tried"
            for name in needs
            if not found[name].is_in_range
        ]
        return Backend(label, not missing, "; ".join(missing or [*outside, *([note] if note else [])]))

    cuda_only = None if has_cuda else "it needs a CUDA device, and there is none"
    return [
        backend("Training, sampling with transformers", "torch", "transformers", "accelerate", "datasets", "trl"),
        backend("Adapters (PEFT)", "peft"),
        backend("vLLM", "vllm", note="" if has_cuda else "no CUDA device: only its build for CPUs works here"),
        backend("Quantized models (bitsandbytes)", "bitsandbytes", note="" if has_cuda else "no CUDA device"),
        backend("DeepSpeed", "deepspeed"),
        backend("FlashAttention 2", "flash-attn", blocked=cuda_only),
        backend("Several processes", "torch", blocked=distributed.missing_backend()),
        backend("Rewards for mathematics (math-verify)", "math-verify"),
        backend("Rewards of reasoning-gym", "reasoning-gym"),
        backend("Rules about the language of a response (py3langid)", "py3langid"),
        backend("Rewards by a judge (httpx2)", "httpx2"),
        *(backend(f"report_to={name!r}", name) for name in ("tensorboard", "wandb", "trackio")),
    ]
