"""A sequence-classification model as a reward function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from sdpo.reprompt import content_text
from sdpo.types import Message, Prompt


class RewardModel:
    """Score of [prompt; completion] by a sequence-classification model with one label, as a reward function."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        tokenizer: Any,
        *,
        chat_template_kwargs: Mapping[str, Any],
        model_init_kwargs: Mapping[str, Any],
        device: torch.device | str,
    ) -> None:
        is_placed = False
        if isinstance(model, str):
            path, revision = model, model_init_kwargs.get("revision")
            is_placed = "device_map" in model_init_kwargs
            model = AutoModelForSequenceClassification.from_pretrained(path, **{**model_init_kwargs, "num_labels": 1})
        else:
            path, revision = model.config.name_or_path, None
        if model.config.num_labels != 1:
            raise ValueError(f"reward model {path!r} has {model.config.num_labels} labels; a reward needs exactly one")
        if tokenizer is None:
            trust_remote_code = model_init_kwargs["trust_remote_code"]
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
        self.model = (model if is_placed else model.to(device)).eval()
        self.tokenizer = tokenizer
        self._chat_template_kwargs = dict(chat_template_kwargs)

    def __call__(self, *, prompts: Sequence[Prompt], completions: Sequence[Any], **_: Any) -> Tensor:
        """Reward of each completion (N,)."""
        ids = [self._ids(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        rows_by_length: dict[int, list[int]] = {}
        for row, row_ids in enumerate(ids):
            rows_by_length.setdefault(len(row_ids), []).append(row)
        rewards = torch.zeros(len(ids))
        with torch.no_grad():
            # Rows of one length need no padding, so a reward does not depend on its neighbours.
            for rows in rows_by_length.values():
                input_ids = torch.tensor([ids[row] for row in rows], device=self.model.device)
                logits = self.model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).logits
                rewards[rows] = logits[:, 0].float().cpu()
        return rewards

    def _ids(self, prompt: Prompt, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt + completion)["input_ids"])
        text = self.tokenizer.apply_chat_template(
            _conversation(prompt, completion[0]["content"]), tokenize=False, **self._chat_template_kwargs
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _conversation(prompt: Sequence[Message], text: str) -> list[Message]:
    """The chat with its answer; a prefilled last turn and its continuation are one turn."""
    messages = [m if m.get("content") is None else {**m, "content": content_text(m["content"])} for m in prompt]
    if messages[-1]["role"] == "assistant":
        return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + text}]
    return [*messages, {"role": "assistant", "content": text}]
