"""Sampling with `model.generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig

from sdpo.collate import pad
from sdpo.types import Completion, SamplingSettings


class TransformersGenerator:
    """Samples from the policy itself, so its completions carry no log-probs of their own."""

    def __init__(self, get_model: Callable[[], nn.Module], *, accelerator: Accelerator, config: GenerationConfig):
        self.get_model = get_model
        self.accelerator = accelerator
        self.config = config
        self.eos_token_ids = frozenset(_as_list(config.eos_token_id))

    def sync(self, step: int) -> None:
        pass

    @torch.no_grad()
    def generate(self, prompt_ids: Sequence[list[int]]) -> list[Completion]:
        model = self.accelerator.unwrap_model(self.get_model())
        device = self.accelerator.device
        ids = pad(prompt_ids, self.config.pad_token_id, dtype=torch.long, left=True).to(device)
        mask = pad([[1] * len(prompt) for prompt in prompt_ids], 0, dtype=torch.long, left=True).to(device)
        with _sampling_mode(model, self.config), self.accelerator.autocast():
            cache = self._shared_prefill(model, prompt_ids, ids, mask)
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=self.config, **cache)
        return [self._cut(completion) for completion in output[:, ids.shape[1] :].tolist()]

    def _shared_prefill(
        self, model: Any, prompt_ids: Sequence[list[int]], ids: Tensor, mask: Tensor
    ) -> dict[str, DynamicCache]:
        """Keys and values of all prompt tokens but the last, computed once a group and handed to each of its rows.

        By the name of the argument that takes them; empty where that saves nothing, or where the model keeps another
        kind of cache.
        """
        is_first = [i == 0 or prompt_ids[i] != prompt_ids[i - 1] for i in range(len(prompt_ids))]
        if all(is_first) or ids.shape[1] < 2 or self.config.cache_implementation is not None:
            return {}
        first = torch.tensor(is_first, device=ids.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[first, :-1]
        output = model(
            input_ids=ids[first, :-1], attention_mask=mask[first, :-1], position_ids=positions, use_cache=True
        )
        name = "cache" if "cache" in output else "past_key_values"  # renamed in transformers 5.24
        cache = output[name]
        if type(cache) is not DynamicCache:
            return {}
        cache.batch_select_indices(first.cumsum(0) - 1)
        return {name: cache}

    def _cut(self, ids: list[int]) -> Completion:
        """The completion up to its first end-of-sequence token; what stands after that is padding."""
        for length, token in enumerate(ids, start=1):
            if token in self.eos_token_ids:
                return Completion(ids[:length], is_truncated=False)
        return Completion(ids, is_truncated=True)


def generation_config(
    sampling: SamplingSettings, *, pad_token_id: int, bos_token_id: int | None, eos_token_ids: Sequence[int]
) -> GenerationConfig:
    """All that decides the distribution, said in full, so that nothing comes in from the model's own defaults."""
    values: dict[str, Any] = {
        "max_new_tokens": sampling.max_completion_length,
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "cache_implementation": sampling.cache_implementation,
        "bos_token_id": bos_token_id,
        "eos_token_id": list(eos_token_ids),
        "pad_token_id": pad_token_id,
        "use_cache": True,
        "disable_compile": True,
    }
    return GenerationConfig(**{**values, **sampling.generation_kwargs})


@contextmanager
def _sampling_mode(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Evaluation mode and this generation config inside; the model's own come back after.

    `generate` fills what a passed config leaves open from the model's config, so that one is replaced as well. PEFT
    copies its own onto the base model, so that is put back too.
    """
    was_training = model.training
    holders = [model, model.get_base_model()] if is_peft_model(model) else [model]
    own = [holder.generation_config for holder in holders]
    model.eval()
    model.generation_config = config
    try:
        yield
    finally:
        for holder, generation_config in zip(holders, own, strict=True):
            holder.generation_config = generation_config
        model.train(was_training)


def _as_list(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)
