"""The teacher: which weights it has, and whether they move.

A copy of the policy shares every frozen parameter with it, so with an adapter (of any PEFT kind) it costs the adapter,
and for full fine-tuning one model. It starts from the student as it was given, in memory, adapter included.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import Tensor, nn

from sdpo.sharding import local, place_copy, reshard
from sdpo.types import TeacherSettings

Parts = Sequence[tuple[nn.Module, float]]
"""Modules and their shares: the teacher's logits are the sum of share * logits."""


class Teacher(Protocol):
    """What the trainer asks of a teacher."""

    @property
    def parts(self) -> Parts:
        """The modules that make its logits."""
        ...

    @property
    def initial(self) -> PolicyCopy | None:
        """The policy at the start, where the teacher keeps it."""
        ...

    def place(self, accelerator: Accelerator) -> None:
        """Puts its weights where the student's are or will be, cut up over the ranks as they are. On every rank."""
        ...

    def start(self) -> None:
        """Takes up the student's parameters as they are placed, before the first step."""
        ...

    def update(self, step: int) -> None:
        """Follows the student after optimizer step number `step` (from 1)."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """What has to come back on resume; empty where the student's own checkpoint has it all.

        Of parameters that are cut up over the ranks, the pieces of this one.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Puts back what `state_dict` gave."""
        ...


class PolicyCopy:
    """The student as it was when this was made: a module that shares all parameters which are not trained.

    `dtype`: of the parameters it has for itself, None for the student's.

    Raises:
        ValueError: a dtype of its own beside shared parameters of another, in one model without adapters.
    """

    def __init__(self, student: nn.Module, *, dtype: torch.dtype | None = None):
        frozen = {p.dtype for p in student.parameters() if not p.requires_grad}
        if dtype is not None and frozen - {dtype} and not is_peft_model(student):
            raise ValueError(
                f"teacher_dtype={dtype} cannot be had where frozen parameters of {sorted(map(str, frozen))} are "
                "shared with the student. Leave teacher_dtype out, or train all parameters."
            )
        shared = {id(p): p for p in student.parameters() if not p.requires_grad}
        self._student = student
        self._keeps: Any = None
        self.names = [name for name, p in student.named_parameters() if p.requires_grad]
        self.model = copy.deepcopy(student, memo=dict(shared)).requires_grad_(False).eval()
        if dtype is not None:
            for parameter in self.trained():
                parameter.data = parameter.data.to(dtype)

    def place(self, accelerator: Accelerator) -> None:
        """Puts it where the student is or will be, cut up over the ranks as it is. On every rank."""
        if self._keeps is None:
            self._keeps = place_copy(self.model, self._student, accelerator)

    def trained(self) -> list[Tensor]:
        """The copies of the trained parameters, in the order of `names`."""
        reshard(self.model)
        parameters = dict(self.model.named_parameters())
        return [parameters[name] for name in self.names]

    def state_dict(self) -> dict[str, Tensor]:
        return {name: local(parameter) for name, parameter in zip(self.names, self.trained(), strict=True)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        copy_all(self.trained(), [state[name] for name in self.names])


class LiveTeacher:
    """The current student: only its prompt differs."""

    initial = None

    def __init__(self, student: nn.Module):
        self.parts = [(student, 1.0)]

    def place(self, accelerator: Accelerator) -> None:
        pass

    def start(self) -> None:
        pass

    def update(self, step: int) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pass


class FrozenTeacher:
    """The student as it was at the start, adapter included."""

    def __init__(self, student: nn.Module, *, dtype: torch.dtype | None):
        self.initial = PolicyCopy(student, dtype=dtype)
        self.parts = [(self.initial.model, 1.0)]

    def place(self, accelerator: Accelerator) -> None:
        self.initial.place(accelerator)

    def start(self) -> None:
        pass

    def update(self, step: int) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return self.initial.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.initial.load_state_dict(state)


class TrustRegionTeacher(FrozenTeacher):
    """softmax((1 - r) logits_initial + r logits_current), on the teacher's prompt (paper, eq. 10)."""

    def __init__(self, student: nn.Module, *, rate: float, dtype: torch.dtype | None):
        super().__init__(student, dtype=dtype)
        self.parts = [(self.initial.model, 1.0 - rate), (student, rate)]


class EMATeacher:
    """Moving average t <- (1 - r) t + r s of every trained parameter, once every `sync_steps` optimizer steps.

    The average is kept in float32: in bfloat16 a small step is rounded away, and the average stands still.
    """

    initial = None

    def __init__(self, student: nn.Module, *, rate: float, sync_steps: int, dtype: torch.dtype | None):
        self.copy = PolicyCopy(student, dtype=dtype)
        self.parts = [(self.copy.model, 1.0)]
        self.rate = rate
        self.sync_steps = sync_steps
        self._module = student
        self._student: list[nn.Parameter] = []
        self._beside: list[Tensor | None] = []
        self.start()

    def place(self, accelerator: Accelerator) -> None:
        self.copy.place(accelerator)

    def start(self) -> None:
        reshard(self._module)
        # By their order: a wrapper may change the names of the student's.
        student = [p for p in self._module.parameters() if p.requires_grad]
        # DeepSpeed rounds parameters in place: the same ones may be of another dtype.
        is_kept = [own.dtype == torch.float32 for own in self.copy.trained()] == [b is None for b in self._beside]
        if is_kept and [id(p) for p in student] == [id(p) for p in self._student]:
            return
        self._student = student
        # A float32 copy is its own average; one of another dtype has its average beside it.
        self._beside = [
            None if own.dtype == torch.float32 else local(given).to(torch.float32, copy=True)
            for own, given in zip(self.copy.trained(), student, strict=True)
        ]

    def _average(self) -> list[Tensor]:
        pairs = zip(self.copy.trained(), self._beside, strict=True)
        return [local(own) if beside is None else beside for own, beside in pairs]

    def _write(self) -> None:
        """Writes the copies that are of another dtype than their averages."""
        for own, beside in zip(self.copy.trained(), self._beside, strict=True):
            if beside is not None:
                copy_all([own], [beside])

    @torch.no_grad()
    def update(self, step: int) -> None:
        if step % self.sync_steps:
            return
        averages, student = self._average(), [local(p) for p in self._student]
        if all(parameter.dtype == torch.float32 for parameter in student):
            torch._foreach_lerp_(averages, student, self.rate)
        else:
            for average, parameter in zip(averages, student, strict=True):
                average.lerp_(parameter.float(), self.rate)
        self._write()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(zip(self.copy.names, self._average(), strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        copy_all(self._average(), [state[name] for name in self.copy.names])
        self._write()


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Writes the sources into the targets, whatever the dtypes and devices.

    Of a parameter that is cut up over the ranks, this rank's piece.
    """
    for target, source in zip(targets, sources, strict=True):
        local(target).copy_(source)


def build_teacher(student: nn.Module, settings: TeacherSettings) -> Teacher:
    """The teacher of this kind for an unwrapped student."""
    match settings.kind:
        case "live":
            return LiveTeacher(student)
        case "base":
            return FrozenTeacher(student, dtype=settings.dtype)
        case "ema":
            return EMATeacher(student, rate=settings.update_rate, sync_steps=settings.sync_steps, dtype=settings.dtype)
        case "trust_region":
            return TrustRegionTeacher(student, rate=settings.update_rate, dtype=settings.dtype)
