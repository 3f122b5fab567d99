"""What is checked of a launch before several processes train."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate import Accelerator

from sdpo import SDPOConfig
from sdpo.sharding import check_placement


def test_processes_that_would_train_alone_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun on a machine without GPUs, where accelerate makes one process of each."""
    args = SDPOConfig(output_dir=str(tmp_path), use_cpu=True)
    accelerator = Accelerator()
    check_placement(accelerator, args)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were started .* knows of 1: each would train alone"):
        check_placement(accelerator, args)
