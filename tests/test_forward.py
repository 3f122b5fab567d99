"""Chunked log-probs and losses against the plain computation on whole (B, T, V) logits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import plain
import pytest
import torch
from conftest import make_model
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from sdpo import chunk as chunk_module
from sdpo import forward, heads
from sdpo.chunk import Taught
from sdpo.collate import pad, sequences
from sdpo.heads import find_head
from sdpo.losses.objective import objective
from sdpo.token_values import token_values
from sdpo.types import LossTerms, Served, TokenTerms, TrainingBatch

SETTINGS = replace(plain.SETTINGS, temperature=0.7, mode="sampled_token")


def make_batch(*, share: bool = True, num_tokens: int = 40) -> tuple[TrainingBatch, Any]:
    """Three rows of unequal lengths and what they are made of; two have the same prompt, one nothing to distill."""
    generator = torch.Generator().manual_seed(1)

    def ids(*shape: int) -> Tensor:
        return torch.randint(8, num_tokens, shape, generator=generator)

    shared, other = ids(3).tolist(), ids(5).tolist()
    prompts = [shared, other, shared]
    teacher_prompts = [ids(n).tolist() for n in (6, 4, 9)]
    completions = [ids(n).tolist() for n in (4, 2, 6)]
    taught = [0, 1]
    layout = {"pad_token_id": 0, "token_cost": 1e6 if share else None}
    mask = pad([[1] * len(c) for c in completions], 0, dtype=torch.bool)
    return TrainingBatch(
        student=sequences(prompts, completions, [0, 1, 2], **layout),
        teacher=sequences(teacher_prompts, completions, taught, **layout),
        completion_ids=pad(completions, 0, dtype=torch.long),
        completion_mask=mask,
        policy_mask=mask,
        distillation_mask=mask & torch.tensor([row in taught for row in range(3)]).unsqueeze(1),
        advantages=torch.tensor([1.0, -0.5, 0.2]),
    ), (prompts, teacher_prompts, completions)


def total(terms: TokenTerms) -> LossTerms:
    """The plainest loss that has a gradient through everything."""
    return LossTerms(terms.divergence.sum() + terms.logps.sum(), {})


def plain_logits(model: nn.Module, prompts: Any, completions: Any) -> Tensor:
    """(B, T, V) logits / temperature, each row alone and unpadded."""
    width = max(map(len, completions))
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        own = torch.tensor([[*prompt, *completion]])
        logits = model(input_ids=own, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / SETTINGS.temperature
        rows.append(nn.functional.pad(logits, (0, 0, 0, width - logits.shape[0])))
    return torch.stack(rows)


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
@pytest.mark.parametrize(("chunk", "share"), [(1, True), (3, True), (10**6, True), (3, False)])
@pytest.mark.parametrize("weight", [1.0, 0.5])
@pytest.mark.parametrize("is_plain", [True, False])
def test_values_and_gradients_equal_the_plain_ones_in_every_mode(
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,
    topk: Any,
    add_tail: bool,
    alpha: float,
    chunk: int,
    share: bool,
    weight: float,
    is_plain: bool,
) -> None:
    monkeypatch.setattr(chunk_module, "CPU_CHUNK", chunk * len(tokenizer))
    monkeypatch.setattr(heads.Head, "is_plain", property(lambda _: is_plain))
    settings = replace(SETTINGS, mode=mode, topk=topk, add_tail=add_tail, alpha=alpha, weight=weight)
    batch, (prompts, teacher_prompts, completions) = make_batch(share=share)
    model, teacher = make_model(tokenizer, seed=0), make_model(tokenizer, seed=1).requires_grad_(False)
    mask = batch.distillation_mask

    student_logits = plain_logits(model, prompts, completions)
    teacher_logits = plain_logits(teacher, teacher_prompts, completions)
    expected = plain.distillation(student_logits, teacher_logits, batch.completion_ids, settings) * mask
    trained = mask | batch.policy_mask if weight < 1 else mask
    logps = student_logits.log_softmax(-1)
    chosen = logps.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    of_policy = torch.linspace(-1, 1, chosen.numel()).view_as(chosen) * (1 - weight)  # any coefficients
    ((expected + of_policy * trained * chosen).sum() / mask.sum()).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    def loss(terms: TokenTerms) -> LossTerms:
        policy = (of_policy * trained * terms.logps).sum() if weight < 1 else 0.0
        return LossTerms((terms.divergence.sum() + policy) / mask.sum(), {})

    head = find_head(model)
    found, terms = forward.token_loss(model, head, batch, settings, loss, teacher=[(teacher, 1.0)])
    found.loss.backward()
    assert (terms.divergence - expected).abs().max() < 1e-5
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).abs().max() < 1e-5
    assert (terms.logps - chosen * trained).abs().max() < 1e-5
    assert (terms.entropy + (logps.exp() * logps).sum(-1) * trained).abs().max() < 1e-5
    taught = teacher_logits.log_softmax(-1).gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    if terms.credit is None:
        assert mode == "topk_logits" and not add_tail, "the teacher is read on its support alone"
    else:
        assert (terms.credit - (taught - chosen) * mask).abs().max() < 1e-5


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("is_reused", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_the_correction_for_the_sampler_does_not_depend_on_the_cut_into_chunks(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, correction: Any, is_reused: bool, level: Any, weight: float
) -> None:
    """The objective by chunks of 3 tokens, and on whole log-probs with autograd. Rows have 4, 2 and 6 tokens."""
    monkeypatch.setattr(chunk_module, "CPU_CHUNK", 3 * len(tokenizer))
    settings = replace(
        SETTINGS, weight=weight, sampler_correction=correction, importance_sampling_level=level, is_clip=1.5
    )
    batch, (prompts, teacher_prompts, completions) = make_batch()
    model, teacher = make_model(tokenizer, seed=0), make_model(tokenizer, seed=1).requires_grad_(False)
    logps = plain_logits(model, prompts, completions).log_softmax(-1)
    chosen = logps.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1) * batch.completion_mask
    sampling = chosen.detach() + (0.05 if is_reused else 0.0)
    # Ratios: tokens above and below the cap of 2 in the first row, whose product is 1.2; products 3 and 0.8 else.
    ratios = torch.tensor([[3.0, 0.5, 0.8, 1.0, 1, 1], [1.5, 2.0, 1, 1, 1, 1], [0.8, 1.0, 1.0, 1.0, 0.5, 2.0]])
    sampled_logps = (sampling - ratios.log()).masked_fill(~batch.completion_mask, 0.0)
    batch = replace(batch, old_logps=sampling if is_reused else None, sampled_logps=sampled_logps)

    taught = plain_logits(teacher, teacher_prompts, completions).log_softmax(-1)
    taught = taught.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    divergence = plain.sampled_token_kl(chosen, taught)
    whole = objective(TokenTerms(chosen, torch.zeros_like(chosen), divergence), batch, settings)
    whole.loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    loss_of = partial(objective, batch=batch, settings=settings)
    parts = [(teacher, 1.0)] if weight > 0 else []
    found, _ = forward.token_loss(model, find_head(model), batch, settings, loss_of, teacher=parts)
    found.loss.backward()
    assert (found.loss - whole.loss).abs() < 1e-5
    largest = max(gradient.abs().max() for gradient in gradients)  # of 1 and more: it sums over all tokens
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).abs().max() < 1e-5 * max(1.0, largest)
    for name in ("sampling/importance_weight", "sampling/logp_difference", "sampling/cut_fraction"):
        for number, expected in zip(found.sums[name], whole.sums[name], strict=True):
            assert (number - expected).abs() < 1e-4


@pytest.mark.parametrize(("mode", "topk", "add_tail", "alpha"), MODES)
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_trust_region_is_the_softmax_of_mixed_logits_in_every_mode(
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,
    topk: Any,
    add_tail: bool,
    alpha: float,
    is_plain: bool,
) -> None:
    """softmax((1 - r) z_initial + r z_current) with r = 0.3, temperature 0.7; the current policy is the student."""
    monkeypatch.setattr(chunk_module, "CPU_CHUNK", 3 * len(tokenizer))
    monkeypatch.setattr(heads.Head, "is_plain", property(lambda _: is_plain))
    settings = replace(SETTINGS, mode=mode, topk=topk, add_tail=add_tail, alpha=alpha)
    batch, (prompts, teacher_prompts, completions) = make_batch()
    initial, student = make_model(tokenizer, seed=1), make_model(tokenizer, seed=0)
    with torch.no_grad():
        mixed = sum(
            share * plain_logits(part, teacher_prompts, completions)
            for part, share in ((initial, 0.7), (student, 0.3))
        )
        own = plain_logits(student, prompts, completions)
        expected = plain.distillation(own, mixed, batch.completion_ids, settings)
    parts = [(initial, 0.7), (student, 0.3)]
    _, terms = forward.token_loss(student, find_head(student), batch, settings, total, teacher=parts)
    assert terms.divergence is not None
    assert (terms.divergence - expected * batch.distillation_mask).abs().max() < 1e-5


@pytest.mark.parametrize(("taught", "is_taught", "calls"), [([0, 1, 2], True, 1), ([0, 1], True, 2), ([], False, 1)])
def test_a_gradient_of_the_head_is_made_only_for_tokens_that_there_are(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, taught: list[int], is_taught: bool, calls: int
) -> None:
    """Of 3 rows at weight 0.5: all distilled, one by the policy term alone, and no teacher."""
    batch, _ = make_batch(share=False)
    rows = torch.tensor([row in taught for row in range(3)]).unsqueeze(1)
    batch = replace(batch, teacher=batch.student, distillation_mask=batch.completion_mask & rows)
    model, teacher = make_model(tokenizer), make_model(tokenizer, seed=1)
    seen = []

    def spy(*args: Any, **more: Any) -> Any:
        seen.append(len(args[2]))
        return token_values(*args, **more)

    monkeypatch.setattr(forward, "token_values", spy)
    settings = replace(SETTINGS, weight=0.5 if is_taught else 0.0)
    loss_of = partial(objective, batch=batch, settings=settings)
    parts = [(teacher, 1.0)] if is_taught else []
    found, _ = forward.token_loss(model, find_head(model), batch, settings, loss_of, teacher=parts)
    found.loss.backward()
    assert len(seen) == calls and sum(seen) == 12, "4, 2 and 6 tokens"
    assert all(p.grad is not None for p in model.parameters())


def test_nothing_to_train_on_gives_zero_gradients_not_none(tokenizer: Any) -> None:
    batch, _ = make_batch()
    nothing = torch.zeros_like(batch.distillation_mask)
    batch = replace(batch, distillation_mask=nothing, policy_mask=nothing)
    model = make_model(tokenizer)
    teacher = make_model(tokenizer, seed=1)
    for settings in (SETTINGS, replace(SETTINGS, mode="topk_logits", topk=5, add_tail=True)):
        found, _ = forward.token_loss(model, find_head(model), batch, settings, total, teacher=[(teacher, 1.0)])
        found.loss.backward()
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
    batch, (prompts, _, completions) = make_batch(share=forward.can_share_prompts(model))
    logps = forward.completion_logps(model, find_head(model), batch, SETTINGS)
    logits = plain_logits(model, prompts, completions)
    expected = logits.log_softmax(-1).gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    assert (logps - expected * batch.completion_mask).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["soft cap", "scale", "division"])
@pytest.mark.parametrize(("mode", "topk", "add_tail", "alpha"), MODES)
def test_the_gradient_goes_through_what_a_family_does_after_its_head(
    monkeypatch: pytest.MonkeyPatch, family: str, mode: Any, topk: Any, add_tail: bool, alpha: float
) -> None:
    torch.manual_seed(0)
    model, teacher = (FAMILIES[family]().float().eval() for _ in range(2))
    monkeypatch.setattr(chunk_module, "CPU_CHUNK", 3 * 50)
    settings = replace(SETTINGS, mode=mode, topk=topk, add_tail=add_tail, alpha=alpha)
    batch, (prompts, teacher_prompts, completions) = make_batch(share=False)
    student_logits = plain_logits(model, prompts, completions)
    teacher_logits = plain_logits(teacher, teacher_prompts, completions).detach()
    expected = plain.distillation(student_logits, teacher_logits, batch.completion_ids, settings)
    expected = expected * batch.distillation_mask
    expected.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    def loss(terms: TokenTerms) -> LossTerms:
        return LossTerms(terms.divergence.sum(), {})

    found, _ = forward.token_loss(model, find_head(model), batch, settings, loss, teacher=[(teacher, 1.0)])
    found.loss.backward()
    assert abs(found.loss.item() - expected.sum().item()) < 1e-4
    largest = max(gradient.abs().max() for gradient in gradients)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).abs().max() < 1e-5 * max(1.0, largest)


@pytest.mark.parametrize("add_tail", [False, True])
def test_a_teacher_served_on_the_students_top_k_is_a_local_one(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, add_tail: bool
) -> None:
    model, teacher = make_model(tokenizer).eval(), make_model(tokenizer, seed=1).eval()
    monkeypatch.setattr(chunk_module, "CPU_CHUNK", 3 * len(tokenizer))  # three tokens at a time
    settings = replace(SETTINGS, mode="topk_logits", topk=5, add_tail=add_tail)
    batch, (prompts, teacher_prompts, completions) = make_batch()
    support = forward.student_support(model, find_head(model), batch, settings)
    best = plain_logits(model, prompts, completions).topk(5, dim=-1).indices
    mask = batch.distillation_mask
    assert torch.equal(support[mask].sort().values, best[mask].sort().values) and not support[~mask].any()

    said = plain_logits(teacher, teacher_prompts, completions).detach().log_softmax(-1)
    own = said.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    served = replace(batch, served=Served(own, support, said.gather(-1, support)))

    def loss(terms: TokenTerms) -> LossTerms:
        return LossTerms((terms.divergence * mask).sum(), {})

    found = []
    for one, parts in ((batch, [(teacher, 1.0)]), (served, [])):
        terms, _ = forward.token_loss(model, find_head(model), one, settings, loss, teacher=parts)
        terms.loss.backward()
        found.append((terms.loss.item(), [p.grad.clone() for p in model.parameters()]))
        model.zero_grad()
    (expected, gradients), (actual, others) = found
    assert expected > 1e-2 and abs(actual - expected) < 1e-5
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(gradients, others, strict=True))


@pytest.mark.parametrize("is_mixed", [False, True], ids=["half", "autocast"])
@pytest.mark.parametrize("way", ["matrix", "columns", "traced"])
def test_small_gradients_survive_a_head_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, way: str, is_mixed: bool
) -> None:
    """A mean over many tokens has gradients below the smallest number of float16."""
    monkeypatch.setattr(heads.Head, "is_plain", property(lambda _: way != "traced"))
    torch.manual_seed(0)
    exact = nn.Linear(8, 30, bias=False)
    exact.weight.data = exact.weight.data.half().float()
    half = nn.Linear(8, 30, bias=False, dtype=None if is_mixed else torch.float16)
    half.weight.data.copy_(exact.weight)
    states, of_teacher, ids = torch.randn(5, 8).half(), torch.randn(5, 8).half(), torch.arange(5)
    settings = replace(SETTINGS, temperature=1.0, mode="topk_logits", topk=4, add_tail=False)
    found = []
    for module in (exact, half):
        head = heads.Head(module)
        hidden = states.to(module.weight.dtype).requires_grad_()
        taught = [Taught(head, 1.0, of_teacher.to(module.weight.dtype))]

        def slopes(rows: slice, _: Any) -> tuple[Tensor | None, Tensor | None]:
            slope = torch.full((rows.stop - rows.start,), 1e-9)
            return (None, slope) if way == "columns" else (slope, None)

        with torch.autocast("cpu", torch.float16, enabled=is_mixed and module is half):
            _, anchor = token_values(head, hidden, ids, taught, settings, slopes=slopes)
        (anchor * 2.0**24).backward()  # as a scaler of the loss does
        found.append((hidden.grad.float(), module.weight.grad.float()))
    for expected, actual in zip(*found, strict=True):
        assert (actual - expected).abs().max() < 1e-2 * expected.abs().max()


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_tokens_that_an_adapter_puts_before_the_prompt_shift_nothing(tokenizer: Any, kind: Any) -> None:
    model = get_peft_model(make_model(tokenizer), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    batch, (prompts, _, completions) = make_batch(share=forward.can_share_prompts(model))
    logps = forward.completion_logps(model, find_head(model), batch, SETTINGS)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, -len(completion) - 1 : -1]
        expected = (logits / SETTINGS.temperature).log_softmax(-1)[range(len(completion)), completion]
        assert (logps[row, : len(completion)] - expected).abs().max() < 1e-5


def test_prompts_are_shared_only_where_that_is_right(tokenizer: Any) -> None:
    assert forward.can_share_prompts(make_model(tokenizer))
    assert forward.can_share_prompts(FAMILIES["absolute positions"]().eval())
    assert not forward.can_share_prompts(FAMILIES["soft cap"]().eval()), "Gemma 2 has sliding windows"
    alibi = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2))
    assert not forward.can_share_prompts(alibi.eval())
    mamba = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4))
    assert not forward.can_share_prompts(mamba)


def test_prompts_are_shared_only_where_that_is_cheaper() -> None:
    long_prompt, long_answer = list(range(50)), list(range(40))
    for prompt, completion, is_shared in ((long_prompt, [1, 2], True), ([1, 2], long_answer, False)):
        found = sequences([prompt] * 4, [completion] * 4, range(4), pad_token_id=0, token_cost=20.0)
        assert found.is_shared == is_shared
        assert found.ids.shape == ((1, 58) if is_shared else (4, 42))


def test_rows_without_a_loss_are_not_read(tokenizer: Any) -> None:
    batch, _ = make_batch(share=False)
    assert batch.student.ids.shape == (3, 9) and batch.teacher.ids.shape == (2, 10)


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
    monkeypatch.setattr(chunk_module, "CPU_CHUNK", 2 * vocabulary)
    seen: list[int] = []
    original = heads.Head.logits

    def spy(self: heads.Head, hidden: Tensor, temperature: float, **memory: Any) -> Tensor:
        seen.append(hidden.shape[0])
        return original(self, hidden, temperature, **memory)

    monkeypatch.setattr(heads.Head, "logits", spy)
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

    batch, _ = make_batch(share=False)
    model, teacher = make_model(tokenizer), make_model(tokenizer, seed=1)
    batch = replace(batch, policy_mask=torch.zeros_like(batch.policy_mask))
    settings = replace(SETTINGS, mode="full_logits", alpha=0.5)
    with Watch():
        found, _ = forward.token_loss(model, find_head(model), batch, settings, total, teacher=[(teacher, 1.0)])
        found.loss.backward()
    seen = [number for number in seen if number]
    assert max(seen) == 2 and len(seen) == 3 * 2  # 6 tokens in 3 chunks: student and teacher, once
    assert largest == 2  # inside the model's own forward the head runs on one position
