"""Rows to tensors: the only padding in the package, and the only place that decides which tokens a loss term sees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdpo.types import LossCounts, Row, TrainingBatch


def pad(sequences: Sequence[Sequence[float]], value: float, *, dtype: torch.dtype, left: bool = False) -> Tensor:
    """(B, longest) tensor of the sequences, filled with `value` on the right, or on the left."""
    longest = max((len(sequence) for sequence in sequences), default=0)
    filled = [[*[value] * (longest - len(s)), *s] if left else [*s, *[value] * (longest - len(s))] for s in sequences]
    return torch.tensor(filled, dtype=dtype).reshape(len(sequences), longest)


def _mask(lengths: Sequence[int], *, left: bool = False) -> Tensor:
    """(B, longest) bool, true on the positions that exist."""
    return pad([[1] * n for n in lengths], 0, dtype=torch.bool, left=left)


def collate(rows: Sequence[Row], *, pad_token_id: int, mask_truncated_completions: bool) -> TrainingBatch:
    """One microbatch.

    Attention sees every token that exists. The policy term leaves out rows without a valid reward, the distillation
    term rows whose teacher knows nothing more, and both the truncated ones if so asked.
    """
    rollouts = [row.scored.rollout for row in rows]
    completions = [rollout.completion for rollout in rollouts]
    students = [[*rollout.prompt_ids, *rollout.completion.ids] for rollout in rollouts]
    teachers = [[*row.teacher_prompt_ids, *row.scored.rollout.completion.ids] for row in rows]
    completion_mask = _mask([len(completion.ids) for completion in completions])
    in_loss = torch.tensor([not (mask_truncated_completions and c.is_truncated) for c in completions])
    has_reward = torch.tensor([row.scored.reward is not None for row in rows])
    is_informative = torch.tensor([row.context.is_informative for row in rows])
    sampled = [completion.sampled_logps for completion in completions]
    return TrainingBatch(
        student_ids=pad(students, pad_token_id, dtype=torch.long),
        student_mask=_mask([len(ids) for ids in students]),
        teacher_ids=pad(teachers, pad_token_id, dtype=torch.long),
        teacher_mask=_mask([len(ids) for ids in teachers]),
        prompt_lengths=torch.tensor([len(rollout.prompt_ids) for rollout in rollouts]),
        teacher_prompt_lengths=torch.tensor([len(row.teacher_prompt_ids) for row in rows]),
        completion_ids=pad([completion.ids for completion in completions], pad_token_id, dtype=torch.long),
        completion_mask=completion_mask,
        policy_mask=completion_mask & (in_loss & has_reward).unsqueeze(1),
        distillation_mask=completion_mask & (in_loss & is_informative).unsqueeze(1),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        sampled_logps=pad([s for s in sampled if s is not None], 0.0, dtype=torch.float32)
        if all(s is not None for s in sampled)
        else None,
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
