"""The output head of a model: from hidden states (N, H) to logits (N, V)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class After(NamedTuple):
    """What a family does to the head's output, and the derivative of that as a function of its result.

    `is_curved`: the derivative depends on the result.
    """

    apply: Callable[[Tensor, float], Tensor]
    derivative: Callable[[Any, float], Any]
    is_curved: bool = False


IDENTITY = After(lambda logits, _: logits, lambda _, __: 1.0)
# By the config field that holds the number (Gemma; Cohere; Granite; Falcon-H1).
CAPPED = After(
    lambda logits, cap: torch.tanh(logits / cap) * cap, lambda capped, cap: 1 - (capped / cap).square(), True
)
SCALED = After(lambda logits, scale: logits * scale, lambda _, scale: scale)
DIVIDED = After(lambda logits, scale: logits / scale, lambda _, scale: 1 / scale)
AFTER_HEAD = {
    "final_logit_softcapping": CAPPED,
    "logit_scale": SCALED,
    "logits_scaling": DIVIDED,
    "lm_head_multiplier": SCALED,
}


@dataclass(frozen=True, slots=True)
class Head:
    """The map from hidden states (N, H) to the model's logits (N, V): output embedding, then scale or soft cap."""

    module: Any
    after: After = IDENTITY
    number: float = 1.0

    def logits(self, hidden: Tensor, temperature: float, *, out: Tensor | None = None) -> Tensor:
        """(N, V) logits / temperature in fp32. `out` (N, V), fp32: memory for them, without a gradient."""
        weight = self.module.weight
        is_narrow = weight.dtype != torch.float32 or torch.is_autocast_enabled(weight.device.type)
        if out is None or is_narrow or not self.is_plain or torch.is_grad_enabled():
            # Not by calling the module: hooks of wrappers take it for a forward pass of the model.
            output = self.module.forward(hidden)
        elif self.module.bias is None:
            output = torch.mm(hidden, weight.T, out=out)
        else:
            output = torch.addmm(self.module.bias, hidden, weight.T, out=out)
        logits = self.after.apply(output, self.number)
        if out is None:
            logits = logits.float()
            return logits if temperature == 1.0 else logits / temperature
        logits = logits if logits is out else out.copy_(logits)
        return logits if temperature == 1.0 else logits.div_(temperature)

    @property
    def is_plain(self) -> bool:
        """Whether the module is one matrix, so that gradients can be written down."""
        return type(self.module) is nn.Linear


def find_head(model: Any) -> Head:
    """The output head of an unwrapped causal language model.

    Raises:
        ValueError: the model has no output embedding.
    """
    module = model.get_output_embeddings()
    if module is None:
        raise ValueError(f"{type(model).__name__} has no output embedding; a causal language model is needed.")
    config = model.config.get_text_config()
    for field, after in AFTER_HEAD.items():
        number = getattr(config, field, None)
        if number is not None:
            return Head(module, after, float(number))
    return Head(module)
