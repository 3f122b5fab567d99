"""Hidden states to log-probs: the only place that does it. fp32, temperature applied, in chunks of tokens.

The backbone runs once over a microbatch; its output head then runs on the tokens that some loss needs, a chunk at a
time, and is run again in the backward pass. So no (B, T, V) tensor exists, only (chunk, V) ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sdpo.collate import lay_out
from sdpo.losses import divergence as dv
from sdpo.types import ObjectiveSettings, Sequences, TokenTerms, TrainingBatch

# Logits held at once, in numbers (64 MB in fp32): small beside any model, large enough to keep a device busy.
CHUNK_LOGITS = 2**24


def _identity(logits: Tensor, _: float) -> Tensor:
    return logits


def _multiply(logits: Tensor, scale: float) -> Tensor:
    return logits * scale


def _divide(logits: Tensor, scale: float) -> Tensor:
    return logits / scale


def _soft_cap(logits: Tensor, cap: float) -> Tensor:
    return torch.tanh(logits / cap) * cap


# What families do to the head's output, by the config field that holds the number (Gemma; Cohere; Granite; Falcon-H1).
AFTER_HEAD: dict[str, Callable[[Tensor, float], Tensor]] = {
    "final_logit_softcapping": _soft_cap,
    "logit_scale": _multiply,
    "logits_scaling": _divide,
    "lm_head_multiplier": _multiply,
}


@dataclass(frozen=True, slots=True)
class Head:
    """The map from hidden states (N, H) to the model's logits (N, V): output embedding, then scale or soft cap."""

    module: Any
    after: Callable[[Tensor, float], Tensor] = _identity
    number: float = 1.0

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """(N, V) logits / temperature in fp32."""
        return self.after(self.module(hidden), self.number).float() / temperature


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


@torch.no_grad()
def check_head(model: Any) -> None:
    """Makes sure that hidden states and head give the model's own logits, on two tokens.

    Raises:
        ValueError: they do not, so losses computed through them would be wrong.
    """
    was_training = model.training
    model.eval()
    ids = torch.tensor([[0, 1]], device=next(model.parameters()).device)
    expected = model(input_ids=ids, use_cache=False).logits[0].float()
    head = find_head(model)
    two = lay_out([[0]], [[1]], [[0]], pad_token_id=0).to(ids.device)
    found = head.logits(hidden_states(model, two, head=head), 1.0)
    model.train(was_training)
    # The same operations on the same numbers; a loose bound allows for another kernel, not for another formula.
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * max(1.0, expected.abs().max().item())):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output embedding in a way that is not known here "
            f"(known by config field: {', '.join(AFTER_HEAD)}). Please report the model type "
            f"{model.config.model_type!r}."
        )


def hidden_states(model: nn.Module, sequences: Sequences, *, head: Head) -> Tensor:
    """(S * L, H) inputs of the output head. `model` may be wrapped (DDP, ...); the head runs on one token only."""
    captured: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        captured.append(args[0])
        return (args[0][:, -1:], *args[1:])

    # Positions count from 0 by default, which is right for a sequence that starts with its prompt.
    inputs = {"position_ids": sequences.positions} if sequences.is_shared else {}
    mask = attention_mask(sequences, dtype=head.module.weight.dtype)
    handle = head.module.register_forward_pre_hook(keep)
    try:
        model(input_ids=sequences.ids, attention_mask=mask, use_cache=False, **inputs)
    finally:
        handle.remove()
    return captured[0].flatten(0, 1)


def attention_mask(sequences: Sequences, *, dtype: torch.dtype) -> Tensor:
    """(S, L), 1 on the tokens that exist; for shared prompts (S, 1, L, L), 0 where a token may look, else very low.

    Every token sees itself, padding too: a row of a softmax over nothing would be NaN.
    """
    segments = sequences.segments
    if not sequences.is_shared:
        return (segments >= 0).long()
    own, other = segments.unsqueeze(2), segments.unsqueeze(1)
    is_before = torch.ones(segments.shape[1], segments.shape[1], dtype=torch.bool, device=segments.device).tril()
    may_look = is_before & ((other == 0) | (other == own))
    dtype = torch.get_autocast_dtype(segments.device.type) if _is_autocast(segments.device) else dtype
    return torch.where(may_look, 0.0, torch.finfo(dtype).min).to(dtype).unsqueeze(1)


def _is_autocast(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type)


@torch.no_grad()
def can_share_prompts(model: Any) -> bool:
    """Whether completions that stand behind one prompt in one sequence get the hidden states they get alone.

    Tried on the model itself. Not so for a sliding window, for layers without attention, or for kernels that take no
    mask of their own.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None)
    is_full = (
        all(kind == "full_attention" for kind in layers) if layers else not getattr(config, "sliding_window", None)
    )
    if not is_full or model.config._attn_implementation not in ("eager", "sdpa"):
        return False
    was_training = model.training
    model.eval()
    prompt, completions = [0, 1, 2], [[3, 4], [5, 6, 7]]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = [[i % vocabulary for i in prompt]] * 2
    completions = [[i % vocabulary for i in completion] for completion in completions]
    device = next(model.parameters()).device
    head = find_head(model)
    found = []
    for groups in ([[0, 1]], [[0], [1]]):
        laid_out = lay_out(prompts, completions, groups, pad_token_id=0).to(device)
        found.append(hidden_states(model, laid_out, head=head)[laid_out.predictors[:, :2].flatten()].float())
    model.train(was_training)
    together, apart = found
    return torch.allclose(together, apart, rtol=1e-2, atol=1e-2 * max(1.0, apart.abs().max().item()))


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """The tokens to compute: `rows`, `columns` (N,) in the (B, T) grid of completions."""

    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, mask: Tensor) -> TokenIndex:
        rows, columns = mask.nonzero(as_tuple=True)
        return cls(rows, columns, (mask.shape[0], mask.shape[1]))

    def of_grid(self, values: Tensor) -> Tensor:
        """(N,) entries of a (B, T) tensor."""
        return values[self.rows, self.columns]

    def spread(self, values: Tensor) -> Tensor:
        """(B, T) tensor with values (N,) in their places and 0 elsewhere."""
        return values.new_zeros(self.shape).index_put((self.rows, self.columns), values)


def chunk_size(head: Head) -> int:
    """Tokens a chunk, so that its logits stay near CHUNK_LOGITS numbers."""
    num_tokens: int = head.module.weight.shape[0]
    return max(1, CHUNK_LOGITS // num_tokens)


def _in_chunks(run: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...], size: int) -> tuple[Tensor, ...]:
    """`run` over chunks of the tensors' first dimension, its outputs joined; activations recomputed in backward."""
    number = max(1, -(-len(tensors[0]) // size))  # one empty chunk for no token: the graph stays whole
    chunks = zip(*(tensor.tensor_split(number) for tensor in tensors), strict=True)
    if torch.is_grad_enabled():
        outputs = [checkpoint(run, *c, use_reentrant=False, preserve_rng_state=False) for c in chunks]
    else:
        outputs = [run(*c) for c in chunks]
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


@torch.no_grad()
def completion_logps(model: nn.Module, head: Head, batch: TrainingBatch, *, temperature: float) -> Tensor:
    """(B, T) log-probs of the tokens that some loss trains on, no gradient, 0 elsewhere."""
    index = TokenIndex.of(batch.policy_mask | batch.distillation_mask)
    hidden = hidden_states(model, batch.student, head=head)[index.of_grid(batch.student.predictors)]

    def run(hidden: Tensor, ids: Tensor) -> tuple[Tensor]:
        logits = head.logits(hidden, temperature)
        return (_gather(logits, ids) - logits.logsumexp(-1),)

    return index.spread(_in_chunks(run, (hidden, index.of_grid(batch.completion_ids)), chunk_size(head))[0])


def token_terms(
    model: nn.Module,
    head: Head,
    batch: TrainingBatch,
    settings: ObjectiveSettings,
    *,
    teacher: Sequence[tuple[nn.Module, float]],
) -> TokenTerms:
    """Per-token values of every token that some term trains on.

    `teacher`: modules and shares, the teacher's logits being the sum of share * logits; none where nothing is
    distilled. Their forward has no gradient.
    """
    student = hidden_states(model, batch.student, head=head)

    def compute(index: TokenIndex, taught: list[Tensor], run: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        hidden = student[index.of_grid(batch.student.predictors)]
        values = _in_chunks(run, (hidden, index.of_grid(batch.completion_ids), *taught), chunk_size(head))
        return [index.spread(v) for v in values]

    def run_alone(hidden: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return _own_values(head.logits(hidden, settings.temperature), ids)[:2]

    if not teacher:
        return TokenTerms(*compute(TokenIndex.of(batch.policy_mask), [], run_alone))
    mixture = [(find_head(part), share) for part, share in teacher]

    def run_taught(hidden: Tensor, ids: Tensor, *taught: Tensor) -> tuple[Tensor, ...]:
        logits = head.logits(hidden, settings.temperature)
        logps, entropy, log_z = _own_values(logits, ids)
        with torch.no_grad():
            teacher_logits = _mix(mixture, taught, settings.temperature)
            teacher_log_z = teacher_logits.logsumexp(-1)
            teacher_logps = _gather(teacher_logits, ids) - teacher_log_z
        if settings.mode == "sampled_token":
            distance = dv.sampled_token_kl(logps, teacher_logps)
        else:
            views = _views(logits, log_z, teacher_logits, teacher_log_z, settings)
            distance = dv.divergence(*views, alpha=settings.alpha)
        return logps, entropy, distance, teacher_logps - logps.detach()

    index = TokenIndex.of(batch.distillation_mask)
    predictors = index.of_grid(batch.teacher.predictors)
    taught = [
        _read(part, batch.teacher, head=part_head)[predictors]
        for (part, _), (part_head, _) in zip(teacher, mixture, strict=True)
    ]
    logps, entropy, distance, credit = compute(index, taught, run_taught)
    rest = TokenIndex.of(batch.policy_mask & ~batch.distillation_mask)
    other_logps, other_entropy = compute(rest, [], run_alone)
    return TokenTerms(logps + other_logps, entropy + other_entropy, distance, credit)


@torch.no_grad()
def _read(model: nn.Module, sequences: Sequences, *, head: Head) -> Tensor:
    """(S * L, H) hidden states in evaluation mode: a teacher that is the student itself is without dropout too."""
    was_training = model.training
    model.eval()
    hidden = hidden_states(model, sequences, head=head)
    model.train(was_training)
    return hidden


def _mix(mixture: Sequence[tuple[Head, float]], hidden: Sequence[Tensor], temperature: float) -> Tensor:
    """(N, V) sum of share * logits / temperature."""
    (head, share), *others = mixture
    logits = head.logits(hidden[0], temperature)
    if not others:
        return logits
    logits = logits * share
    for (head, share), states in zip(others, hidden[1:], strict=True):
        logits.add_(head.logits(states, temperature), alpha=share)
    return logits


def _own_values(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the token, entropy (no gradient) and log normalizer of the student, each (N,)."""
    log_z = logits.logsumexp(-1)
    with torch.no_grad():
        entropy = torch.special.entr((logits - log_z.unsqueeze(-1)).exp()).sum(-1)
    return _gather(logits, ids) - log_z, entropy, log_z


def _gather(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _views(
    logits: Tensor, log_z: Tensor, teacher_logits: Tensor, teacher_log_z: Tensor, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """Aligned log-probs (N, K') of student and teacher: the vocabulary, or the student's top k (paper, eq. 11)."""
    if settings.topk is None:
        return logits - log_z.unsqueeze(-1), teacher_logits - teacher_log_z.unsqueeze(-1)
    support = logits.topk(settings.topk, dim=-1).indices
    student = logits.gather(-1, support) - log_z.unsqueeze(-1)
    teacher = teacher_logits.gather(-1, support) - teacher_log_z.unsqueeze(-1)
    if settings.add_tail:
        student = dv.with_tail(student, dv.tail_logp(logits, support, log_normalizer=log_z))
        return student, dv.with_tail(teacher, dv.tail_logp(teacher_logits, support, log_normalizer=teacher_log_z))
    return dv.renormalize(student), dv.renormalize(teacher)
