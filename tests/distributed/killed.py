"""A run of which one rank is killed in its second step, by its own reward function: python killed.py FOLDER KIND."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from cases import BLEND, ROWS, build


def deadly(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    if trainer_state.global_step == 1 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text) % 2) for text in completions]


if __name__ == "__main__":
    world_size = int(os.environ["WORLD_SIZE"])
    case = BLEND.having(reward=deadly, kind=sys.argv[2], max_steps=5)
    build(case, Path(sys.argv[1]), world_size=world_size, microbatch=ROWS // world_size).train()
