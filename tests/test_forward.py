"""Chunked log-probs and losses against the plain computation on whole (B, T, V) logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_model
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
)

from sdpo import forward
from sdpo.losses import divergence as dv
from sdpo.types import ObjectiveSettings, TrainingBatch

SETTINGS = ObjectiveSettings(
    loss_type="dapo",
    max_completion_length=8,
    temperature=0.7,
    beta=0.0,
    epsilon=0.2,
    epsilon_high=0.2,
    importance_sampling_level="token",
    weight=1.0,
    alpha=1.0,
    mode="sampled_token",
    topk=None,
    is_clip=None,
    add_tail=False,
)


def make_batch(*, num_tokens: int = 40) -> TrainingBatch:
    """Three rows of unequal lengths; the last has nothing to distill."""
    generator = torch.Generator().manual_seed(1)

    def ids(*shape: int) -> Tensor:
        return torch.randint(8, num_tokens, shape, generator=generator)

    prompts, teacher_prompts, lengths = [3, 5, 2], [6, 4, 9], [4, 2, 6]
    completions = [ids(n) for n in lengths]
    students = [torch.cat([ids(p), c]) for p, c in zip(prompts, completions, strict=True)]
    teachers = [torch.cat([ids(p), c]) for p, c in zip(teacher_prompts, completions, strict=True)]

    def stack(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return padded, torch.arange(padded.shape[1]) < torch.tensor([len(r) for r in rows]).unsqueeze(1)

    (student_ids, student_mask), (teacher_ids, teacher_mask) = stack(students), stack(teachers)
    completion_ids, mask = stack(completions)
    return TrainingBatch(
        student_ids=student_ids,
        student_mask=student_mask,
        teacher_ids=teacher_ids,
        teacher_mask=teacher_mask,
        prompt_lengths=torch.tensor(prompts),
        teacher_prompt_lengths=torch.tensor(teacher_prompts),
        completion_ids=completion_ids,
        completion_mask=mask,
        policy_mask=mask,
        distillation_mask=mask & torch.tensor([True, True, False]).unsqueeze(1),
        advantages=torch.tensor([1.0, -0.5, 0.2]),
    )


def plain_logits(model: nn.Module, ids: Tensor, mask: Tensor, lengths: Tensor, shape: Any) -> Tensor:
    """(B, T, V) logits / temperature, each row alone and unpadded."""
    rows = []
    for i, length in enumerate(lengths.tolist()):
        own = ids[i, : int(mask[i].sum())].unsqueeze(0)
        logits = model(input_ids=own, use_cache=False).logits[0, length - 1 : -1].float() / SETTINGS.temperature
        rows.append(nn.functional.pad(logits, (0, 0, 0, shape[1] - logits.shape[0])))
    return torch.stack(rows)


def plain_divergence(student: Tensor, teacher: Tensor, batch: TrainingBatch, settings: ObjectiveSettings) -> Tensor:
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    if settings.mode == "sampled_token":
        ids = batch.completion_ids.unsqueeze(-1)
        return dv.sampled_token_kl(student.gather(-1, ids).squeeze(-1), teacher.gather(-1, ids).squeeze(-1))
    if settings.topk is not None:
        support = student.topk(settings.topk, -1).indices
        views = [logps.gather(-1, support) for logps in (student, teacher)]
        if settings.add_tail:
            outside = torch.ones_like(student, dtype=torch.bool).scatter(-1, support, False)
            tails = [x.masked_fill(~outside, -torch.inf).logsumexp(-1, keepdim=True) for x in (student, teacher)]
            student, teacher = (torch.cat([v, t], -1) for v, t in zip(views, tails, strict=True))
        else:
            student, teacher = (view.log_softmax(-1) for view in views)
    return dv.divergence(student, teacher, alpha=settings.alpha)


MODES = [
    ("sampled_token", None, False, 1.0),
    ("full_logits", None, False, 0.0),
    ("full_logits", None, False, 0.5),
    ("full_logits", None, False, 1.0),
    ("topk_logits", 5, False, 0.5),
    ("topk_logits", 5, True, 0.0),
    ("topk_logits", 5, True, 0.5),
    ("topk_logits", 5, True, 1.0),
]


@pytest.mark.parametrize(("mode", "topk", "add_tail", "alpha"), MODES)
@pytest.mark.parametrize("chunk", [1, 3, 10**6])
def test_values_and_gradients_equal_the_plain_ones_in_every_mode(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, mode: Any, topk: Any, add_tail: bool, alpha: float, chunk: int
) -> None:
    monkeypatch.setattr(forward, "CHUNK_LOGITS", chunk * len(tokenizer))
    settings = replace(SETTINGS, mode=mode, topk=topk, add_tail=add_tail, alpha=alpha)
    batch = make_batch()
    model, teacher = make_model(tokenizer, seed=0), make_model(tokenizer, seed=1).requires_grad_(False)
    mask = batch.distillation_mask

    student_logits = plain_logits(model, batch.student_ids, batch.student_mask, batch.prompt_lengths, mask.shape)
    teacher_logits = plain_logits(
        teacher, batch.teacher_ids, batch.teacher_mask, batch.teacher_prompt_lengths, mask.shape
    )
    expected = plain_divergence(student_logits, teacher_logits, batch, settings) * mask
    (expected.sum() / mask.sum()).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    head = forward.find_head(model)
    terms = forward.token_terms(model, head, batch, settings, teacher=teacher, teacher_head=forward.find_head(teacher))
    (terms.divergence.sum() / mask.sum()).backward()
    assert (terms.divergence - expected).abs().max() < 1e-5
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).abs().max() < 1e-5
    logps = student_logits.log_softmax(-1)
    chosen = logps.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    assert (terms.logps - chosen * mask).abs().max() < 1e-5
    assert (terms.entropy + (logps.exp() * logps).sum(-1) * mask).abs().max() < 1e-5
    taught = teacher_logits.log_softmax(-1).gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    assert (terms.credit - (taught - chosen) * mask).abs().max() < 1e-5


def test_nothing_to_train_on_gives_zero_gradients_not_none(tokenizer: Any) -> None:
    batch = make_batch()
    batch = replace(batch, distillation_mask=torch.zeros_like(batch.distillation_mask))
    model = make_model(tokenizer)
    teacher = make_model(tokenizer, seed=1)
    for settings in (SETTINGS, replace(SETTINGS, mode="topk_logits", topk=5, add_tail=True)):
        terms = forward.token_terms(
            model,
            forward.find_head(model),
            batch,
            settings,
            teacher=teacher,
            teacher_head=forward.find_head(teacher),
        )
        (terms.divergence.sum() + terms.logps.sum()).backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        assert all(p.grad is None for p in teacher.parameters())


SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
FAMILIES = {
    "soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0)),
    "scale": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    "division": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=3.0)),
    "absolute positions": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, initializer_range=0.3)
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_does_after_its_head_is_done_in_chunks_too(family: str) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]().float().eval()
    forward.check_head(model)
    batch = make_batch()
    logps = forward.completion_logps(model, forward.find_head(model), batch, temperature=SETTINGS.temperature)
    logits = plain_logits(
        model, batch.student_ids, batch.student_mask, batch.prompt_lengths, batch.completion_mask.shape
    )
    expected = logits.log_softmax(-1).gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    assert (logps - expected * batch.completion_mask).abs().max() < 1e-5


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(tokenizer: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model(tokenizer)
            self.config = self.inner.config

        def get_output_embeddings(self) -> nn.Module:
            return self.inner.get_output_embeddings()

        def forward(self, **inputs: Any) -> Any:
            outputs = self.inner(**inputs)
            outputs.logits = outputs.logits.flip(-1)
            return outputs

    with pytest.raises(ValueError, match="after the output embedding"):
        forward.check_head(Odd())


def test_no_tensor_of_all_tokens_times_the_vocabulary_is_made(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor with a vocabulary dimension has one chunk's tokens."""
    vocabulary = len(tokenizer)
    monkeypatch.setattr(forward, "CHUNK_LOGITS", 2 * vocabulary)
    seen: list[int] = []
    original = forward.Head.logits

    def spy(self: forward.Head, hidden: Tensor, temperature: float) -> Tensor:
        seen.append(hidden.shape[0])
        return original(self, hidden, temperature)

    monkeypatch.setattr(forward.Head, "logits", spy)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                is_logits = isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[-1] == vocabulary
                # the head's weight gradient (H, V) has 16 rows, which is its own
                if is_logits and tensor.shape[0] != 16:
                    largest = max(largest, tensor.numel() // vocabulary)
            return out

    batch = make_batch()
    model, teacher = make_model(tokenizer), make_model(tokenizer, seed=1)
    settings = replace(SETTINGS, mode="full_logits", alpha=0.5)
    with Watch():
        terms = forward.token_terms(
            model,
            forward.find_head(model),
            batch,
            settings,
            teacher=teacher,
            teacher_head=forward.find_head(teacher),
        )
        terms.divergence.sum().backward()
    assert max(seen) == 2 and len(seen) == 3 * 3 + 3  # 6 tokens in 3 chunks: student and teacher, twice
    assert largest <= 3  # the head runs on the last position of each of the 3 rows inside the model's own forward
