"""A run of which one rank ends in its second step: python killed.py FOLDER KIND, and `full` to fail in gathering.

Otherwise its own reward function kills it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from cases import BLEND, ROWS, build

from sdpo import SDPOTrainer


def deadly(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    if trainer_state.global_step == 1 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text) % 2) for text in completions]


def any_reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 2) for text in completions]


def fill_memory(trainer: SDPOTrainer) -> None:
    """Lets the second rank fail when the policy is gathered for the second block, with half of its layers gathered."""
    from torch.distributed.fsdp import FSDPModule

    gather, num_calls = FSDPModule.unshard, 0

    def unshard(self: Any, *given: Any, **keywords: Any) -> Any:
        nonlocal num_calls
        num_calls += trainer.state.global_step == 1
        if num_calls == 3 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("no memory for the next layer")
        return gather(self, *given, **keywords)

    FSDPModule.unshard = unshard  # type: ignore[method-assign]


if __name__ == "__main__":
    world_size, is_full = int(os.environ["WORLD_SIZE"]), "full" in sys.argv
    case = BLEND.having(kind=sys.argv[2], max_steps=5, samples=is_full, reward=any_reward if is_full else deadly)
    made = build(case, Path(sys.argv[1]), world_size=world_size, microbatch=ROWS // world_size)
    if is_full:
        fill_memory(made)
    made.train()
