"""Where completions come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from accelerate import Accelerator
from torch import nn

from sdpo.generation.transformers import TransformersGenerator, generation_config, is_plain_sampling
from sdpo.types import Completion, EngineSettings, Report, SamplingSettings


class Generator(Protocol):
    """Draws completions from the current policy."""

    def sync(self, step: int) -> None:
        """Makes sure that the weights used are those after optimizer step number `step`."""
        ...

    def generate(self, prompt_ids: Sequence[list[int]]) -> list[Completion]:
        """One completion a prompt, in order; the copies of a prompt stand next to each other."""
        ...


def build_generator(
    get_model: Callable[[], nn.Module],
    *,
    accelerator: Accelerator,
    processing_class: Any,
    tokenizer: Any,
    eos_token_ids: Sequence[int],
    sampling: SamplingSettings,
    engine: EngineSettings | None,
    gathers_weights: bool = True,
    report: Report | None = None,
) -> Generator:
    """The generator that the settings ask for; `engine` None: the policy itself, by transformers.

    `report` is told what is drawn so far; None where nobody listens. A server answers a block in one request, so there
    it has nothing to tell.
    """
    common: dict[str, Any] = {"accelerator": accelerator, "sampling": sampling, "eos_token_ids": eos_token_ids}
    if engine is not None and engine.mode == "server":
        from sdpo.generation.server import ServerGenerator

        return ServerGenerator(get_model, settings=engine, **common)
    if engine is not None:
        from sdpo.generation.vllm import ColocatedGenerator

        return ColocatedGenerator(
            get_model, processing_class=processing_class, settings=engine, report=report, **common
        )
    return TransformersGenerator(
        get_model,
        accelerator=accelerator,
        config=generation_config(
            sampling,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_ids=eos_token_ids,
        ),
        is_plain=is_plain_sampling(sampling),
        gathers_weights=gathers_weights,
        report=report,
    )
