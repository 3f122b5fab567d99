"""The teacher: which weights it has, and whether they move.

A copy of the policy shares every frozen parameter with it, so with an adapter (of any PEFT kind) it costs the adapter,
and for full fine-tuning one model. It starts from the student as it was given, in memory, adapter included.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from sdpo.types import TeacherSettings


def copy_policy(student: nn.Module) -> nn.Module:
    """A frozen copy of the student as it is now; parameters that are not trained are the same objects."""
    shared = {id(p): p for p in student.parameters() if not p.requires_grad}
    twin = copy.deepcopy(student, memo=dict(shared))
    return twin.requires_grad_(False).eval()


class Teacher(Protocol):
    """What the trainer asks of a teacher."""

    @property
    def model(self) -> nn.Module:
        """The module whose forward is the teacher's."""
        ...

    def update(self, step: int) -> None:
        """Follows the student after optimizer step number `step` (from 1)."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """What has to come back on resume; empty where the student's own checkpoint has it all."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Puts back what `state_dict` gave."""
        ...


class LiveTeacher:
    """The current student: only its prompt differs."""

    def __init__(self, student: nn.Module):
        self.model = student

    def update(self, step: int) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pass


class FrozenTeacher:
    """The student as it was at the start, adapter included."""

    def __init__(self, student: nn.Module):
        self.model = copy_policy(student)
        self._names = [name for name, p in student.named_parameters() if p.requires_grad]

    def _trained(self) -> dict[str, nn.Parameter]:
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name] for name in self._names}

    def update(self, step: int) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._trained().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, parameter in self._trained().items():
            parameter.copy_(state[name])


class EMATeacher(FrozenTeacher):
    """Moving average t <- (1 - r) t + r s of every trained parameter, once every `sync_steps` optimizer steps."""

    def __init__(self, student: nn.Module, *, rate: float, sync_steps: int):
        super().__init__(student)
        self.rate = rate
        self.sync_steps = sync_steps
        parameters = dict(student.named_parameters())
        self._student: list[Tensor] = [parameters[name] for name in self._names]

    @torch.no_grad()
    def update(self, step: int) -> None:
        if step % self.sync_steps == 0:
            teacher: list[Tensor] = list(self._trained().values())
            torch._foreach_lerp_(teacher, self._student, self.rate)


def build_teacher(student: nn.Module, settings: TeacherSettings) -> Teacher:
    """The teacher of this kind for an unwrapped student."""
    match settings.kind:
        case "live":
            return LiveTeacher(student)
        case "base":
            return FrozenTeacher(student)
        case "ema":
            return EMATeacher(student, rate=settings.update_rate, sync_steps=settings.sync_steps)
        case "trust_region":
            raise ValueError(
                "teacher_model_kind='trust_region' is not available yet; set teacher_model_kind to 'ema', 'base' or "
                "'live'."
            )
