"""Rows to tensors: the only padding in the package, and the only place that decides which tokens a loss term sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sdpo.types import Completion, LossCounts, Row, Sequences, Served, ServedToken, TrainingBatch

MAX_MASK = 2**26  # numbers in the attention mask of shared prompts, (S, L, L): 256 MB in float32


def pad(sequences: Sequence[Sequence[float]], value: float, *, dtype: torch.dtype, left: bool = False) -> Tensor:
    """(B, longest) tensor of the sequences, filled with `value` on the right, or on the left."""
    longest = max((len(sequence) for sequence in sequences), default=0)
    filled = [[*[value] * (longest - len(s)), *s] if left else [*s, *[value] * (longest - len(s))] for s in sequences]
    return torch.tensor(filled, dtype=dtype).reshape(len(sequences), longest)


def _mask(lengths: Sequence[int], *, left: bool = False) -> Tensor:
    """(B, longest) bool, true on the positions that exist."""
    return pad([[1] * n for n in lengths], 0, dtype=torch.bool, left=left)


def collate(
    rows: Sequence[Row],
    *,
    pad_token_id: int,
    mask_truncated_completions: bool,
    weight: float,
    token_cost: float | None,
) -> TrainingBatch:
    """One microbatch.

    The policy term leaves out rows without a valid reward, the distillation term rows whose teacher knows nothing
    more, and both the truncated ones if so asked. At distillation weight 0 or 1 the other term trains on nothing. Rows
    that no term trains on are in no sequence. `token_cost`: see `sequences`.
    """
    completions = [row.scored.rollout.completion for row in rows]
    ids = [completion.ids for completion in completions]
    completion_mask = _mask([len(completion) for completion in ids])
    in_loss = [not (mask_truncated_completions and completion.is_truncated) for completion in completions]
    in_policy = [ok and weight < 1 and row.scored.reward is not None for ok, row in zip(in_loss, rows, strict=True)]
    in_teaching = [ok and weight > 0 and row.context.is_informative for ok, row in zip(in_loss, rows, strict=True)]
    student_rows = [i for i in range(len(rows)) if in_policy[i] or in_teaching[i]]
    teacher_rows = [i for i in range(len(rows)) if in_teaching[i]]
    prompts = [row.scored.rollout.prompt_ids for row in rows]
    teacher_prompts = [row.teacher_prompt_ids for row in rows]
    return TrainingBatch(
        student=sequences(prompts, ids, student_rows, pad_token_id=pad_token_id, token_cost=token_cost),
        teacher=sequences(teacher_prompts, ids, teacher_rows, pad_token_id=pad_token_id, token_cost=token_cost),
        completion_ids=pad(ids, pad_token_id, dtype=torch.long),
        completion_mask=completion_mask,
        policy_mask=completion_mask & torch.tensor(in_policy).unsqueeze(1),
        distillation_mask=completion_mask & torch.tensor(in_teaching).unsqueeze(1),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        sampled_logps=_sampled_logps(completions),
        rows=[plain(row) for row in rows],
    )


def plain(row: Row) -> dict[str, Any]:
    """What a row was, in values that a checkpoint can hold."""
    return {
        "prompt_ids": row.scored.rollout.prompt_ids,
        "completion_ids": row.scored.rollout.completion.ids,
        "teacher_prompt_ids": row.teacher_prompt_ids,
        "reward": row.scored.reward,
        "feedback": row.scored.feedback,
    }


def idle_batch(*, pad_token_id: int) -> TrainingBatch:
    """A microbatch of one empty completion: a forward pass for a rank that has nothing left while others have."""
    nothing = torch.zeros((1, 0), dtype=torch.bool)
    read = lay_out([[pad_token_id]], [[]], [[0]], pad_token_id=pad_token_id)
    return TrainingBatch(
        student=read,
        teacher=read,
        completion_ids=nothing.long(),
        completion_mask=nothing,
        policy_mask=nothing,
        distillation_mask=nothing,
        advantages=torch.zeros(1),
    )


def _sampled_logps(completions: Sequence[Completion]) -> Tensor | None:
    """(B, T) log-probs of the sampler, 0 on padding; None unless every row has them."""
    found = [completion.sampled_logps for completion in completions if completion.sampled_logps is not None]
    if len(found) < len(completions):
        return None
    for completion, logps in zip(completions, found, strict=True):
        assert len(logps) == len(completion.ids), "a sampler gives one log-prob a token"
    return pad(found, 0.0, dtype=torch.float32)


def served_grid(shape: torch.Size, rows: Mapping[int, Sequence[ServedToken]], *, topk: int) -> Served:
    """What a server says of the tokens of some rows, in a microbatch of this shape (B, T)."""
    found = Served(
        logps=torch.zeros(shape),
        ids=torch.zeros((*shape, topk), dtype=torch.long),
        support_logps=torch.zeros((*shape, topk)),
    )
    for row, tokens in rows.items():
        found.logps[row, : len(tokens)] = torch.tensor([token.logp for token in tokens])
        if topk:
            found.ids[row, : len(tokens)] = torch.tensor([token.ids for token in tokens])
            found.support_logps[row, : len(tokens)] = torch.tensor([token.logps for token in tokens])
    return found


def sequences(
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    chosen: Sequence[int],
    *,
    pad_token_id: int,
    token_cost: float | None,
) -> Sequences:
    """What a model reads for the chosen rows; one token where none is chosen, so that every rank runs a forward.

    Rows with the same prompt share it where that is cheaper: a token costs `token_cost` in the linear layers and its
    sequence's length in attention, in the same unit, which is 4 H multiplications a layer for hidden size H. A linear
    part of 12 H^2 parameters makes that 6 H. None: the model cannot share.
    """
    if not chosen:
        nothing = pad([[0] * len(completion) for completion in completions], 0, dtype=torch.long)
        return replace(lay_out([prompts[0][:1]], [[]], [[0]], pad_token_id=pad_token_id), predictors=nothing)
    apart = [[row] for row in chosen]
    shared: dict[tuple[int, ...], list[int]] = {}
    for [row] in apart:
        shared.setdefault(tuple(prompts[row]), []).append(row)
    together = list(shared.values())

    def cost(groups: list[list[int]], token_cost: float) -> float:
        longest = max(len(prompts[group[0]]) + sum(len(completions[row]) for row in group) for group in groups)
        return len(groups) * longest * (token_cost + longest)

    longest = max(len(prompts[group[0]]) + sum(len(completions[row]) for row in group) for group in together)
    has_room = len(together) * longest**2 <= MAX_MASK
    is_shared = token_cost is not None and has_room and cost(together, token_cost) < cost(apart, token_cost)
    return lay_out(prompts, completions, together if is_shared else apart, pad_token_id=pad_token_id)


def lay_out(
    prompts: Sequence[list[int]], completions: Sequence[list[int]], groups: list[list[int]], *, pad_token_id: int
) -> Sequences:
    """One sequence a group of rows with the same prompt."""
    ids = [[*prompts[group[0]], *(token for row in group for token in completions[row])] for group in groups]
    longest = max(len(sequence) for sequence in ids)
    positions: list[list[int]] = []
    segments: list[list[int]] = []
    predictors = [[0] * len(completion) for completion in completions]
    for number, group in enumerate(groups):
        num_prompt = len(prompts[group[0]])
        assert num_prompt, "the first token of a completion needs one before it"
        positions.append(list(range(num_prompt)))
        segments.append([0] * num_prompt)
        for segment, row in enumerate(group, start=1):
            start, num_tokens = number * longest + len(segments[-1]), len(completions[row])
            # The end of the prompt predicts the first token, and each token the one after it.
            first = [number * longest + num_prompt - 1][:num_tokens]
            predictors[row] = [*first, *range(start, start + num_tokens - 1)]
            positions[-1] += range(num_prompt, num_prompt + num_tokens)
            segments[-1] += [segment] * num_tokens
    return Sequences(
        ids=pad(ids, pad_token_id, dtype=torch.long),
        positions=pad(positions, 0, dtype=torch.long),
        segments=pad(segments, -1, dtype=torch.long),
        predictors=pad(predictors, 0, dtype=torch.long),
        is_shared=any(len(group) > 1 for group in groups),
    )


def teacher_context_tensors(rows: Sequence[Row], *, pad_token_id: int) -> dict[str, Tensor]:
    """What callbacks are shown of a block.

    teacher_input_ids, teacher_attention_mask (B, Q + T): teacher prompt padded on the left, completion on the right;
    prompt_ids (B, P) padded on the left; completion_ids, completion_mask (B, T); self_distillation_mask (B,) float.
    """
    teacher_prompts = [row.teacher_prompt_ids for row in rows]
    completions = [row.scored.rollout.completion.ids for row in rows]
    completion_ids = pad(completions, pad_token_id, dtype=torch.long)
    completion_mask = _mask([len(ids) for ids in completions]).long()
    teacher_prompt_mask = _mask([len(ids) for ids in teacher_prompts], left=True).long()
    return {
        "teacher_input_ids": torch.cat(
            [pad(teacher_prompts, pad_token_id, dtype=torch.long, left=True), completion_ids], dim=1
        ),
        "teacher_attention_mask": torch.cat([teacher_prompt_mask, completion_mask], dim=1),
        "prompt_ids": pad([r.scored.rollout.prompt_ids for r in rows], pad_token_id, dtype=torch.long, left=True),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "self_distillation_mask": torch.tensor([float(row.context.is_informative) for row in rows]),
    }


def count_trained(batch: TrainingBatch) -> LossCounts:
    """Tokens and sequences of one microbatch that each loss term trains on."""
    policy, distillation = batch.policy_mask, batch.distillation_mask
    return LossCounts(
        policy_tokens=float(policy.sum()),
        policy_sequences=float(policy.any(dim=1).sum()),
        distillation_tokens=float(distillation.sum()),
        distillation_sequences=float(distillation.any(dim=1).sum()),
        microbatches=1.0,
    )


def join_logps(parts: Sequence[Tensor | None]) -> Tensor | None:
    """(B, T) log-probs of a block from those of its microbatches, None where there are none."""
    present = [row for part in parts if part is not None for row in part.tolist()]
    return pad(present, 0.0, dtype=torch.float32) if present else None
