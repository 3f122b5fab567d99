"""A microbatch through student and teacher: hidden states, and the values of the tokens that some loss needs.

The backbone runs once over the sequences; what the output head makes of its hidden states is in `heads`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import Tensor, nn

from sdpo.chunk import ServedValues, Taught, TeacherInput, TokenValues
from sdpo.collate import lay_out
from sdpo.distributed import from_main
from sdpo.heads import AFTER_HEAD, Head, find_head
from sdpo.sharding import whole, whole_in_backward, whole_model
from sdpo.token_values import Slopes, likeliest_tokens, token_values, top_support
from sdpo.types import Alternatives, LossTerms, ObjectiveSettings, Sequences, TokenTerms, TrainingBatch


@torch.no_grad()
def check_head(model: Any) -> None:
    """Makes sure that hidden states and head give the model's own logits, on two tokens.

    Raises:
        ValueError: they do not, so losses computed through them would be wrong; or the model adds a loss of its own.
    """
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            "output_router_logits=True asks for the load-balancing loss of the experts, which is not trained here. "
            "Set model.config.output_router_logits = False."
        )
    was_training = model.training
    model.eval()
    ids = torch.tensor([[0, 1]], device=next(model.parameters()).device)
    expected = model(input_ids=ids, use_cache=False).logits[0, -2:].float()
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


def try_model(model: Any, accelerator: Accelerator) -> bool:
    """Whether rows can share a prompt (`can_share_prompts`), of a model that `check_head` lets through. On every rank.

    It is tried on the main process: the others may not even have the weights yet.
    """

    def found() -> bool:
        check_head(model)
        return can_share_prompts(model)

    # On every rank before it is wrapped: hooks run in the order they came, and all ranks must have the same.
    _Tap.on(find_head(model).module)
    with whole_model(model, accelerator):
        return from_main(found, accelerator)


class _Tap:
    """Takes what goes into an output head, and lets one position of it through, while it is open.

    It stays on the module: a hook that comes and goes makes `torch.compile` start anew each time.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.taken: Tensor | None = None

    def __call__(self, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.is_open:
            return args
        self.taken = args[0]
        return (args[0][:1, -1:], *args[1:])

    @classmethod
    def on(cls, module: nn.Module) -> _Tap:
        """The tap of this module, put there at the first call."""
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, cls):
                return hook
        tap = cls()
        module.register_forward_pre_hook(tap)
        return tap


def hidden_states(model: nn.Module, sequences: Sequences, *, head: Head) -> Tensor:
    """(S * L, H) inputs of the output head. `model` may be wrapped (DDP, ...); the head runs on one token only."""
    # Positions count from 0 by default, which is right for a sequence that starts with its prompt.
    inputs = {"position_ids": sequences.positions} if sequences.is_shared else {}
    mask = attention_mask(sequences, dtype=head.module.weight.dtype)
    tap = _Tap.on(head.module)
    tap.is_open = True
    try:
        output = model(input_ids=sequences.ids, attention_mask=mask, use_cache=False, **inputs)
        assert tap.taken is not None, "the model did not call its output head"
        # Prompt tuning puts tokens of its own before the sequence; they predict nothing here.
        hidden = tap.taken[:, -sequences.ids.shape[1] :].flatten(0, 1)
        if output.logits.requires_grad and not hidden.requires_grad:
            # Only the head is trained. FSDP2 collects gradients in a backward pass through the model's output.
            hidden = hidden + output.logits.flatten()[:0].sum()
        return hidden
    finally:
        tap.is_open, tap.taken = False, None


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
    if torch.is_autocast_enabled(segments.device.type):
        dtype = torch.get_autocast_dtype(segments.device.type)
    mask = torch.zeros(may_look.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~may_look, torch.finfo(dtype).min).unsqueeze(1)


@torch.no_grad()
def can_share_prompts(model: Any) -> bool:
    """Whether completions that stand behind one prompt in one sequence get the hidden states they get alone.

    Not so where positions are not an input, or act through something else than it (ALiBi), for a sliding window, for
    layers without attention, and for kernels that take no mask of their own. Where none of that is known, it is tried
    on the model, with one completion far from the prompt.
    """
    if is_peft_model(model) and model.active_peft_config.is_prompt_learning:
        return False
    base = model.get_base_model() if is_peft_model(model) else model
    config = base.config.get_text_config()
    layers = getattr(config, "layer_types", None) or []
    is_ruled_out = (
        "position_ids" not in inspect.signature(base.forward).parameters
        or bool(getattr(config, "alibi", False))
        or any(kind != "full_attention" for kind in layers)
        or (not layers and getattr(config, "sliding_window", None) is not None)
        or base.config._attn_implementation not in ("eager", "sdpa")
    )
    if is_ruled_out:
        return False
    was_training = model.training
    model.eval()
    parameter = next(model.parameters())
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = [[i % vocabulary for i in (0, 1, 2)]] * 2
    length = min(40, getattr(config, "max_position_embeddings", 64) - len(prompts[0]))
    completions = [[i % vocabulary for i in range(start, start + length)] for start in (3, 50)]
    head, found = find_head(model), []
    for groups in ([[0, 1]], [[0], [1]]):
        laid_out = lay_out(prompts, completions, groups, pad_token_id=0).to(parameter.device)
        found.append(hidden_states(model, laid_out, head=head)[laid_out.predictors.flatten()].float())
    model.train(was_training)
    together, apart = found
    # Another order of summation, not another formula: relative to the largest number, a few roundings a layer.
    tolerance = 1e-4 if parameter.dtype == torch.float32 else 5e-2
    return bool((together - apart).abs().max() <= tolerance * apart.abs().max())


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
        """(B, T, ...) tensor with values (N, ...) in their places and 0 elsewhere."""
        return values.new_zeros((*self.shape, *values.shape[1:])).index_put((self.rows, self.columns), values)


@torch.no_grad()
def completion_logps(model: nn.Module, head: Head, batch: TrainingBatch, settings: ObjectiveSettings) -> Tensor:
    """(B, T) log-probs of the tokens that some loss trains on, in evaluation mode, no gradient, 0 elsewhere."""
    hidden = _read(model, batch.student, head=head)
    with whole([(model, head.module)]):
        return _logps(head, hidden, batch, settings)


@torch.no_grad()
def student_support(model: nn.Module, head: Head, batch: TrainingBatch, settings: ObjectiveSettings) -> Tensor:
    """(B, T, K) ids of the student's top k at the tokens to distill, in evaluation mode, 0 elsewhere."""
    assert settings.topk is not None
    index = TokenIndex.of(batch.distillation_mask)
    hidden = _read(model, batch.student, head=head)[index.of_grid(batch.student.predictors)]
    with whole([(model, head.module)]):
        return index.spread(top_support(head, hidden, settings.topk))


@torch.no_grad()
def _logps(head: Head, student: Tensor, batch: TrainingBatch, settings: ObjectiveSettings) -> Tensor:
    """The same, of hidden states (S * L, H)."""
    index = TokenIndex.of(batch.policy_mask | batch.distillation_mask)
    hidden = student[index.of_grid(batch.student.predictors)]
    values, _ = token_values(head, hidden, index.of_grid(batch.completion_ids), [], settings)
    return index.spread(values.logps)


Loss = Callable[[TokenTerms], LossTerms]


def token_loss(
    model: nn.Module,
    head: Head,
    batch: TrainingBatch,
    settings: ObjectiveSettings,
    loss: Loss,
    *,
    teacher: Sequence[tuple[nn.Module, float]],
    num_alternatives: int = 0,
) -> tuple[LossTerms, TokenTerms]:
    """`loss` of this microbatch with its gradient, and the per-token values it is made of, which have none.

    What a token adds to the gradient may depend on its own terms; on those of its row only as `couples_tokens` says.
    `teacher`: modules and shares, the teacher's logits being the sum of share * logits; none where nothing is
    distilled, or where the batch has what a server said of it. Their forward has no gradient. `num_alternatives`:
    likeliest tokens of student and teacher to find for the distilled ones; above 0 both heads run once more.
    """
    student = hidden_states(model, batch.student, head=head)
    is_taught = bool(teacher) or batch.served is not None
    taught_mask = batch.distillation_mask if is_taught else torch.zeros_like(batch.distillation_mask)
    parts: list[tuple[TokenIndex, TeacherInput]] = []
    if is_taught:
        index = TokenIndex.of(taught_mask)
        parts.append((index, _teacher_input(batch, index, teacher)))
    untaught = TokenIndex.of(batch.policy_mask & ~taught_mask)  # tokens that only the policy term trains on
    # Each part has a gradient of the whole head, so one of no tokens is left out.
    if settings.weight < 1 and (len(untaught.rows) or not parts):
        parts.append((untaught, []))
    # After the last forward pass, and in force until the backward pass: see `whole`.
    with whole([(model, head.module), *((part, find_head(part).module) for part, _ in teacher)]):
        terms, anchor = _token_terms(head, student, batch, settings, loss, parts)
        if num_alternatives and is_taught:
            found = _alternatives(head, student, batch, *parts[0], settings, num_alternatives)
            terms = replace(terms, alternatives=found)
    value = loss(terms)
    return replace(value, loss=value.loss + whole_in_backward(anchor, head.module)), terms


def _token_terms(
    head: Head,
    student: Tensor,
    batch: TrainingBatch,
    settings: ObjectiveSettings,
    loss: Loss,
    parts: Sequence[tuple[TokenIndex, TeacherInput]],
) -> tuple[TokenTerms, Tensor]:
    """Per-token values of hidden states (S * L, H), for parts of the tokens that do not overlap, and their anchor."""
    if couples_tokens(batch, settings):
        known = _logps(head, student, batch, settings)
    elif batch.old_logps is None:
        known = torch.zeros_like(batch.completion_ids, dtype=torch.float32)
    else:
        known = batch.old_logps
    grids, anchors = [], []
    for index, taught in parts:
        hidden, ids = student[index.of_grid(batch.student.predictors)], index.of_grid(batch.completion_ids)
        slopes = _slopes(loss, index, known)
        values, anchor = token_values(head, hidden, ids, taught, settings, slopes=slopes)
        grids.append([None if value is None else index.spread(value) for value in values])
        anchors.append(anchor)
    logps, entropy, distance, credit = (_total(column) for column in zip(*grids, strict=True))
    assert logps is not None and entropy is not None
    return TokenTerms(logps, entropy, distance, credit), torch.stack(anchors).sum()


def _alternatives(
    head: Head,
    student: Tensor,
    batch: TrainingBatch,
    index: TokenIndex,
    taught: TeacherInput,
    settings: ObjectiveSettings,
    number: int,
) -> Alternatives:
    """The likeliest tokens at the tokens of `index`, from the student's hidden states (S * L, H)."""
    hidden, ids = student.detach()[index.of_grid(batch.student.predictors)], index.of_grid(batch.completion_ids)
    found = likeliest_tokens(head, hidden, ids, taught, settings, number=number)
    return Alternatives(*map(index.spread, found))


def _teacher_input(
    batch: TrainingBatch, index: TokenIndex, teacher: Sequence[tuple[nn.Module, float]]
) -> TeacherInput:
    """The teacher of the tokens of `index`: what a server said of it, or the hidden states of its parts."""
    if batch.served is not None:
        served = batch.served
        return ServedValues(*(index.of_grid(grid) for grid in (served.logps, served.ids, served.support_logps)))
    predictors = index.of_grid(batch.teacher.predictors)
    taught = []
    for part, share in teacher:
        head = find_head(part)
        taught.append(Taught(head, share, _read(part, batch.teacher, head=head)[predictors]))
    return taught


def couples_tokens(batch: TrainingBatch, settings: ObjectiveSettings) -> bool:
    """Whether a token's gradient depends on the log-probs of its row: a ratio of the whole sequence does that.

    Without `old_logps` the policy term's ratio is 1, but the weights for the sampler are made of current log-probs.
    Then a weight of the whole sequence does it, and so does that ratio, which spreads the weights over the row.
    """
    is_ratio_whole = settings.importance_sampling_level == "sequence"
    if batch.old_logps is not None:
        return is_ratio_whole
    if settings.sampler_correction is None or batch.sampled_logps is None:
        return False
    return is_ratio_whole or settings.sampler_correction.startswith("sequence")


def _slopes(loss: Loss, index: TokenIndex, known: Tensor) -> Slopes:
    """What a chunk of the tokens of `index` adds to the loss, differentiated; `known` (B, T): log-probs elsewhere."""

    def slopes(rows: slice, values: TokenValues) -> tuple[Tensor | None, Tensor | None]:
        part = TokenIndex(index.rows[rows], index.columns[rows], index.shape)
        with torch.enable_grad():
            logps = values.logps.detach().requires_grad_()
            distance = None if values.divergence is None else values.divergence.detach().requires_grad_()
            terms = TokenTerms(
                logps=known.index_put((part.rows, part.columns), logps),
                entropy=part.spread(values.entropy),
                divergence=known.new_zeros(known.shape) if distance is None else part.spread(distance),
                credit=None,
            )
            total = loss(terms).loss
            leaves = [logps] if distance is None else [logps, distance]
            found = torch.autograd.grad(total, leaves, allow_unused=True)
        return found[0], found[1] if len(found) > 1 else None

    return slopes


def _total(grids: Sequence[Tensor | None]) -> Tensor | None:
    """Sum of the (B, T) tensors that there are."""
    present = [grid for grid in grids if grid is not None]
    return torch.stack(present).sum(0) if present else None


@torch.no_grad()
def _read(model: nn.Module, sequences: Sequences, *, head: Head) -> Tensor:
    """(S * L, H) hidden states in evaluation mode: also a teacher that is the student itself is without dropout."""
    was_training = model.training
    model.eval()
    hidden = hidden_states(model, sequences, head=head)
    model.train(was_training)
    return hidden
