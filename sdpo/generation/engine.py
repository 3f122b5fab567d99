"""What the colocated engine and the server have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from sdpo.sharding import reshard
from sdpo.types import Completion, SamplingSettings

PROBE_LENGTH = 8
TOLERANCE, HALF_TOLERANCE = 1e-3, 3e-1
"""Of the log-prob of a token, in nats, between two implementations of one model, in float32 and in half precision."""


def sampling_params(sampling: SamplingSettings, *, number: int, eos_token_ids: Collection[int]) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for `number` completions of a prompt, all that decides the distribution."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": sampling.max_completion_length,
        "stop_token_ids": sorted(eos_token_ids),
        "logprobs": 0,  # that of the token drawn
        **sampling.generation_kwargs,
        "n": number,
    }


def grouped(prompts: Iterable[list[int]]) -> list[tuple[list[int], int]]:
    """Prompts that stand next to each other and are equal, once each, with their number: one request of an engine."""
    return [(ids, len(list(copies))) for ids, copies in groupby(prompts)]


def completion_of(ids: list[int], logps: Sequence[float | None] | None, *, is_truncated: bool) -> Completion:
    """A completion of an engine, with NaN for the log-probs that it does not know."""
    sampled = None if logps is None else [float("nan") if logp is None else logp for logp in logps]
    return Completion(ids, is_truncated=is_truncated, sampled_logps=sampled)


State = tuple[int, int, tuple[tuple[bool, tuple[str, ...]], ...]]


def weights_of(model: nn.Module, step: int) -> State:
    """Changes when the policy does: by an optimizer step, by loading a checkpoint, or by the choice of adapters."""
    reshard(model)  # a parameter and its whole have versions of their own
    layers: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "disable_adapters", None), bool)]
    adapters = tuple((layer.disable_adapters, tuple(layer.active_adapters)) for layer in layers)
    return step, sum(parameter._version for parameter in model.parameters()), adapters


@torch.no_grad()
def check_weights(model: Any, score: Callable[[list[int]], list[float]], *, accelerator: Accelerator) -> None:
    """Compares the log-probs of one short sequence under the policy and under the engine, after a push. On every rank.

    `score` returns those of ids[1:].

    Raises:
        RuntimeError: they differ by more than two implementations of one model do.
    """
    policy = accelerator.unwrap_model(model)
    vocabulary = policy.config.get_text_config().vocab_size
    ids = [7 * i % vocabulary for i in range(1, PROBE_LENGTH + 1)]
    was_training = model.training
    model.eval()
    inputs = torch.tensor([ids], device=accelerator.device)
    logits = model(input_ids=inputs, use_cache=False).logits[0, :-1].float()
    model.train(was_training)
    expected = logits.log_softmax(-1).gather(-1, inputs[0, 1:].unsqueeze(-1)).squeeze(-1).cpu()
    difference = (torch.tensor(score(ids)) - expected).abs().max().item()
    is_mixed = accelerator.mixed_precision != "no"
    tolerance = HALF_TOLERANCE if is_mixed or policy.dtype != torch.float32 else TOLERANCE
    if not difference <= tolerance:
        raise RuntimeError(
            f"After the weights were sent, vLLM's log-probs of a probe differ from the policy's by {difference:.3g} "
            f"nats, and at most {tolerance:g} is expected. The engine does not hold the policy: check that it runs "
            "the same model and dtype, and that tied embeddings are the same on both sides."
        )
