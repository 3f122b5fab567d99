"""What the colocated engine and the server have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from sdpo.types import Completion, SamplingSettings

PROBE_LENGTH = 8
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 3e-1}
"""Of the log-prob of a token, in nats, between two implementations of one model."""


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


def completion_of(
    ids: list[int], logps: list[float | None] | None, *, eos_token_ids: Collection[int], limit: int
) -> Completion:
    """A completion of an engine: truncated where it has reached the limit without an end-of-sequence token."""
    sampled = None if logps is None else [float("nan") if logp is None else logp for logp in logps]
    is_ended = bool(ids) and ids[-1] in eos_token_ids
    return Completion(ids, is_truncated=len(ids) >= limit and not is_ended, sampled_logps=sampled)


@torch.no_grad()
def check_weights(model: Any, score: Callable[[list[int]], list[float]] | None, *, device: torch.device) -> None:
    """Compares the log-probs of one short sequence under the policy and under the engine, after a push.

    `score` returns those of ids[1:] (None: this rank has no engine to ask, and only takes part in the forward).

    Raises:
        RuntimeError: they differ by more than two implementations of one model do.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    vocabulary = inner.get_input_embeddings().weight.shape[0]
    ids = [7 * i % vocabulary for i in range(1, PROBE_LENGTH + 1)]
    was_training = model.training
    model.eval()
    logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, :-1].float()
    model.train(was_training)
    if score is None:
        return
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:], device=device).unsqueeze(-1)).squeeze(-1)
    found = torch.tensor(score(ids), device=device)
    difference = (found - expected).abs().max().item()
    tolerance = TOLERANCE.get(inner.dtype, 3e-1)
    if not difference <= tolerance:
        raise RuntimeError(
            f"After the weights were sent, vLLM's log-probs of a probe differ from the policy's by {difference:.3g} "
            f"nats (at most {tolerance:g} is expected in {inner.dtype}). The engine does not hold the policy: check "
            "that it runs the same model and dtype, and that tied embeddings are the same on both sides."
        )
