"""Sampling with `model.generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer

from sdpo.collate import pad
from sdpo.sharding import is_sharded, whole_model
from sdpo.types import Completion, Report, SamplingSettings

INTERVAL = 0.2  # seconds between two counts of what `generate` has drawn


class TransformersGenerator:
    """Samples from the policy itself, so its completions carry no log-probs of their own.

    A prompt is read once for all its completions. Where sampling is plain (a temperature and nothing else), tokens are
    drawn here and finished completions leave the batch; any other setting goes through `model.generate`.

    A policy that is cut up over the ranks is made whole for it, and then each rank draws at its own pace. With
    `gathers_weights` False it stays cut up: `generate` goes on until the last rank has finished.
    """

    def __init__(
        self,
        get_model: Callable[[], nn.Module],
        *,
        accelerator: Accelerator,
        config: GenerationConfig,
        is_plain: bool,
        gathers_weights: bool = True,
        report: Report | None = None,
    ):
        self.get_model = get_model
        self.accelerator = accelerator
        self.config = config
        self.is_plain = is_plain
        self.gathers_weights = gathers_weights
        self.report = report
        self.eos_token_ids = frozenset(_as_list(config.eos_token_id))

    def sync(self, step: int) -> None:
        pass

    @torch.no_grad()
    def generate(self, prompt_ids: Sequence[list[int]]) -> list[Completion]:
        wrapped = self.get_model()
        if not self.gathers_weights and is_sharded(wrapped):
            return self._generate_together(self.accelerator.unwrap_model(wrapped), prompt_ids)
        with whole_model(wrapped, self.accelerator) as model:
            return self._generate(model, prompt_ids) if prompt_ids else []

    def _inputs(self, prompt_ids: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask (B, P), padded on the left."""
        device = self.accelerator.device
        ids = pad(prompt_ids, self.config.pad_token_id, dtype=torch.long, left=True).to(device)
        mask = pad([[1] * len(prompt) for prompt in prompt_ids], 0, dtype=torch.long, left=True).to(device)
        return ids, mask

    def _generate_together(self, model: Any, prompt_ids: Sequence[list[int]]) -> list[Completion]:
        """Completions of a policy that is cut up: every forward pass is one of all ranks, also of one without rows."""
        if is_peft_model(model) and model.active_peft_config.is_prompt_learning:
            raise ValueError("Prompt and prefix tuning need ds3_gather_for_generation=True where the model is cut up.")
        ids, mask = self._inputs(prompt_ids or [[self.config.pad_token_id]])
        with _sampling_mode(model, self.config), self.accelerator.autocast():
            output = model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=self.config,
                synced_gpus=True,
                stopping_criteria=self._watchers(ids),
            )
        return [self._cut(completion) for completion in output[: len(prompt_ids), ids.shape[1] :].tolist()]

    def _generate(self, model: Any, prompt_ids: Sequence[list[int]]) -> list[Completion]:
        ids, mask = self._inputs(prompt_ids)
        with _sampling_mode(model, self.config), self.accelerator.autocast():
            if is_peft_model(model) and model.active_peft_config.is_prompt_learning:
                return [self._cut(completion) for completion in self._sample_whole(model, prompt_ids)]
            name, cache = _prefill(model, prompt_ids, ids, mask)
            if cache is not None and self.is_plain:
                with _few_rows(model.get_output_embeddings()):
                    drawn = self._sample(model, name, cache, ids, mask)
                return [self._cut(completion) for completion in drawn]
            prefilled = {} if cache is None or self.config.cache_implementation is not None else {name: cache}
            output = model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=self.config,
                stopping_criteria=self._watchers(ids),
                **prefilled,
            )
        return [self._cut(completion) for completion in output[:, ids.shape[1] :].tolist()]

    def _watchers(self, ids: Tensor) -> StoppingCriteriaList | None:
        """What tells how far `generate` is; None where nobody listens."""
        if self.report is None:
            return None
        return StoppingCriteriaList([_Watch(self.report, ids, ends=self.eos_token_ids)])

    def _sample(self, model: Any, name: str, cache: DynamicCache, ids: Tensor, mask: Tensor) -> list[list[int]]:
        """Completions of all rows, drawn token by token; rows that have ended are dropped from the cache."""
        completions: list[list[int]] = [[] for _ in ids]
        ends = torch.tensor(sorted(self.eos_token_ids), device=ids.device)
        rows = torch.arange(len(ids), device=ids.device)
        token, position = ids[:, -1:], mask.sum(-1, keepdim=True) - 1
        report, num_tokens = self.report or _ignore, 0
        for _ in range(self.config.max_new_tokens):
            inputs = {"input_ids": token, "attention_mask": mask, "position_ids": position, name: cache}
            logits = model(**inputs, use_cache=True).logits[:, -1].float()
            token = draw(logits, temperature=self.config.temperature).unsqueeze(-1)
            for row, drawn in zip(rows.tolist(), token.squeeze(-1).tolist(), strict=True):
                completions[row].append(drawn)
            num_tokens += len(rows)
            report(len(ids) - len(rows), num_tokens)
            goes_on = ~torch.isin(token.squeeze(-1), ends)
            if not goes_on.all():
                rows, token, position, mask = rows[goes_on], token[goes_on], position[goes_on], mask[goes_on]
                if not len(rows):
                    break
                cache.batch_select_indices(goes_on.nonzero().squeeze(-1))
            position = position + 1
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        return completions

    def _sample_whole(self, model: Any, prompt_ids: Sequence[list[int]]) -> list[list[int]]:
        """Completions drawn token by token, reading the whole sequence each time, as training does.

        For prompt and prefix tuning: PEFT's own generation with a cache draws from other positions than its forward.
        """
        if not self.is_plain:
            raise ValueError(
                "With prompt or prefix tuning only a temperature can act on sampling: set top_p=1.0, top_k=0, "
                "min_p=None, repetition_penalty=1.0 and no generation_kwargs or cache_implementation."
            )
        sequences = [list(prompt) for prompt in prompt_ids]
        going = list(range(len(sequences)))
        head = model.get_output_embeddings()
        report, num_tokens = self.report or _ignore, 0
        for _ in range(self.config.max_new_tokens):
            lengths = [len(sequences[row]) for row in going]
            ids = pad([sequences[row] for row in going], self.config.pad_token_id, dtype=torch.long)
            mask = pad([[1] * length for length in lengths], 0, dtype=torch.long)
            ends = (
                torch.tensor(lengths) - ids.shape[1] - 1
            )  # counted from the end: there may be tokens before the prompt

            def last(_: Any, args: tuple[Tensor, ...], ends: Tensor = ends) -> tuple[Tensor, ...]:
                return (args[0][torch.arange(len(ends)), ends].unsqueeze(1), *args[1:])

            handle = head.register_forward_pre_hook(last)
            try:
                device = self.accelerator.device
                logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits[:, -1]
            finally:
                handle.remove()
            drawn = draw(logits.float(), temperature=self.config.temperature).tolist()
            for row, token in zip(going, drawn, strict=True):
                sequences[row].append(token)
            num_tokens += len(going)
            going = [row for row, token in zip(going, drawn, strict=True) if token not in self.eos_token_ids]
            report(len(sequences) - len(going), num_tokens)
            if not going:
                break
        return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompt_ids, strict=True)]

    def _cut(self, ids: list[int]) -> Completion:
        """The completion up to its first end-of-sequence token; what stands after that is padding."""
        for length, token in enumerate(ids, start=1):
            if token in self.eos_token_ids:
                return Completion(ids[:length], is_truncated=False)
        return Completion(ids, is_truncated=True)


def _ignore(num_finished: int, num_tokens: int) -> None:
    """A report to nobody."""


class _Watch(StoppingCriteria):
    """Reports completions finished and tokens drawn inside `generate`, some times a second, and stops nothing.

    `generate` does not wait for the device in each step, and neither does this: counts are copied to the host beside
    its work and reported in the first step that finds them there.
    """

    def __init__(self, report: Report, prompt_ids: Tensor, *, ends: Collection[int]):
        self.report, self.num_prompt = report, prompt_ids.shape[1]
        self.ends = torch.tensor(sorted(ends), device=prompt_ids.device)
        self.never = torch.zeros(len(prompt_ids), dtype=torch.bool, device=prompt_ids.device)
        self.counts: Tensor | None = None
        self.copied: torch.Event | None = None
        self.next = time.monotonic() + INTERVAL

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self.counts is not None and (self.copied is None or self.copied.query()):
            num_finished, num_tokens = self.counts.tolist()
            self.report(num_finished, num_tokens)
            self.counts = None
        if self.counts is None and time.monotonic() >= self.next:
            self.next = time.monotonic() + INTERVAL
            is_end = torch.isin(input_ids[:, self.num_prompt :], self.ends)
            num_ends = is_end.cumsum(1)
            is_drawn = (num_ends - is_end.long()) == 0  # what stands after the first end is padding
            counts = torch.stack([(num_ends[:, -1] > 0).sum(), is_drawn.sum()])
            self.counts = counts.to("cpu", non_blocking=True)
            if counts.device.type == "cuda":
                self.copied = torch.Event(device=counts.device)
                self.copied.record()
        return self.never


def _prefill(
    model: Any, prompt_ids: Sequence[list[int]], ids: Tensor, mask: Tensor
) -> tuple[str, DynamicCache | None]:
    """Keys and values of all prompt tokens but the last, computed once a group and handed to each of its rows.

    With the name of the argument that takes them; None for prompts of one token, and for models that keep another kind
    of cache.
    """
    if ids.shape[1] < 2:
        return "", None
    is_first = [i == 0 or prompt_ids[i] != prompt_ids[i - 1] for i in range(len(prompt_ids))]
    first = torch.tensor(is_first, device=ids.device)
    head = model.get_output_embeddings()
    # Nothing is drawn here, so the head runs on one position: all of them would be a (rows, prompt, V) tensor.
    handle = head.register_forward_pre_hook(lambda _, args: (args[0][:1, -1:], *args[1:]))
    try:
        output = model(
            input_ids=ids[first, :-1],
            attention_mask=mask[first, :-1],
            position_ids=(mask[first, :-1].cumsum(-1) - 1).clamp(min=0),
            use_cache=True,
        )
    finally:
        handle.remove()
    name = "cache" if "cache" in output else "past_key_values"  # renamed in transformers 5.24
    cache = output.get(name)
    if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return name, None  # a sliding window, or layers that keep a state instead of keys and values
    if not all(is_first):
        cache.batch_select_indices(first.cumsum(0) - 1)
    return name, cache


@contextmanager
def _few_rows(head: Any) -> Iterator[None]:
    """Inside, a plain output head on a CPU multiplies few rows in the way that its library is fast at."""
    is_plain = type(head) is nn.Linear and "forward" not in vars(head)  # as hooks of accelerate put there
    if not is_plain or head.weight.device.type != "cpu" or head.weight.dtype != torch.float32:
        yield
        return
    head.forward = partial(_multiply, head)  # of this object; its class's comes back
    try:
        yield
    finally:
        del head.forward


def _multiply(head: nn.Linear, hidden: Tensor) -> Tensor:
    """(B, 1, V) logits of hidden states (B, 1, H).

    With AVX-512 the product is fast for whole tiles of 16 rows, so fewer are filled up; otherwise it is fast for up to
    8 rows where the large matrix stands first.
    """
    rows = hidden.flatten(0, -2)
    has_tiles = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if has_tiles and 4 <= len(rows) < 16:
        filled = torch.cat([rows, rows[:1].expand(16 - len(rows), -1)])
        logits = nn.functional.linear(filled, head.weight, head.bias)[: len(rows)]
    elif not has_tiles and len(rows) <= 8:
        logits = torch.mm(head.weight, rows.T).T.contiguous()
        logits = logits if head.bias is None else logits + head.bias
    else:
        logits = nn.functional.linear(rows, head.weight, head.bias)
    return logits.view(*hidden.shape[:-1], -1)


def draw(logits: Tensor, *, temperature: float = 1.0, block: int = 256) -> Tensor:
    """One token a row (B,) from softmax(logits / temperature), logits (B, V), by the inverse of the distribution.

    A uniform number picks a block of the vocabulary by the blocks' masses, then a token within it; nothing is sorted,
    and no cumulative sum runs over the whole vocabulary.
    """
    mass = logits - logits.amax(-1, keepdim=True)
    mass = (mass if temperature == 1.0 else mass.div_(temperature)).exp_()
    rest = -mass.shape[-1] % block
    if rest:
        mass = torch.cat([mass, mass.new_zeros(len(mass), rest)], dim=-1)
    blocks = mass.view(len(mass), -1, block)
    ends = blocks.sum(-1).double().cumsum(-1)
    target = torch.rand(len(mass), 1, dtype=torch.float64, device=mass.device) * ends[:, -1:]
    chosen = torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[1] - 1)
    before = torch.where(chosen > 0, ends.gather(-1, (chosen - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, block)).squeeze(1).double()
    offset = torch.searchsorted(inside.cumsum(-1), target - before, right=True)
    # Rounding may point just past the last token that has any mass.
    last = block - 1 - (inside.flip(-1) > 0).int().argmax(-1, keepdim=True)
    return (chosen * block + torch.minimum(offset, last)).squeeze(-1)


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


def is_plain_sampling(sampling: SamplingSettings) -> bool:
    """Whether tokens are drawn from softmax(logits / temperature) and nothing else acts on them."""
    return (
        not sampling.generation_kwargs
        and sampling.top_p == 1.0
        and sampling.top_k == 0
        and not sampling.min_p
        and sampling.repetition_penalty == 1.0
        and sampling.cache_implementation is None
    )


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
        # A compiled model would be compiled again for the length of every step.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for holder, generation_config in zip(holders, own, strict=True):
            holder.generation_config = generation_config
        model.train(was_training)


def _as_list(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)
