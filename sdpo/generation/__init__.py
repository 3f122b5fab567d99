"""Where completions come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from accelerate import Accelerator
from torch import nn

from sdpo.generation.transformers import TransformersGenerator, generation_config, is_plain_sampling
from sdpo.types import Completion, SamplingSettings


class Generator(Protocol):
    """Draws completions from the current policy."""

    def sync(self, step: int) -> None:
        """Makes sure that the weights used are those after optimizer step number `step`."""
        ...

    def generate(self, prompt_ids: Sequence[list[int]]) -> list[Completion]:
        """One completion a prompt, in order; the copies of a prompt stand next to each other."""
        ...


def build_generator(
    *,
    use_vllm: bool,
    get_model: Callable[[], nn.Module],
    accelerator: Accelerator,
    pad_token_id: int,
    bos_token_id: int | None,
    eos_token_ids: Sequence[int],
    sampling: SamplingSettings,
) -> Generator:
    """The generator that the settings ask for."""
    if use_vllm:
        raise ValueError("use_vllm=True is not available yet; set use_vllm=False to sample with transformers.")
    return TransformersGenerator(
        get_model,
        accelerator=accelerator,
        config=generation_config(
            sampling, pad_token_id=pad_token_id, bos_token_id=bos_token_id, eos_token_ids=eos_token_ids
        ),
        is_plain=is_plain_sampling(sampling),
    )
