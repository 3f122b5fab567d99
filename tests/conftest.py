"""A two-layer model, tokenizers made in memory, and a generator that says what it is told."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from sdpo import SDPOConfig, SDPOTrainer
from sdpo.types import Completion

torch.set_num_threads(1)

WORDS = [f"w{i}" for i in range(40)]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id a word: <pad> 0, <eos> 1, <|end|> 2, the role marks, then single characters and w0 ... w39."""
    special = ["<pad>", "<eos>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<unk>"]
    characters = [chr(c) for c in range(33, 127)]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, **overrides: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.3,  # far from uniform, so that differences show
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attention_dropout=0.0,
        **overrides,
    )
    return Qwen2ForCausalLM(config).float()


class ScriptedGenerator:
    """Returns the next completions of a script (words, the end token added unless cut) and counts its calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Sequence[str], *, is_truncated: bool = False):
        self.tokenizer = tokenizer
        self.script = list(script)
        self.is_truncated = is_truncated
        self.calls: list[list[list[int]]] = []
        self.num_given = 0

    def sync(self, step: int) -> None:
        pass

    def generate(self, prompt_ids: Sequence[list[int]]) -> list[Completion]:
        self.calls.append([list(ids) for ids in prompt_ids])
        completions = []
        for _ in prompt_ids:
            ids = self.tokenizer(self.script[self.num_given % len(self.script)], add_special_tokens=False)["input_ids"]
            end = [] if self.is_truncated else [self.tokenizer.eos_token_id]
            completions.append(Completion([*ids, *end], is_truncated=self.is_truncated))
            self.num_given += 1
        return completions


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    return make_model(tokenizer)


TrainerFactory = Callable[..., SDPOTrainer]


@pytest.fixture
def make_trainer(tokenizer: PreTrainedTokenizerFast, tmp_path: Any) -> TrainerFactory:
    """Builds a trainer on the tiny model. `script` replaces sampling; `rewards` are returned in a cycle."""

    def make(
        *,
        script: Sequence[str] | None = ("w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w1 w1"),
        rewards: Sequence[Any] = (1.0, 0.0, 0.0, 0.0),
        prompts: Sequence[Any] = ("w10 w11 w12",),
        model: Any = None,
        truncated: bool = False,
        columns: dict[str, list[Any]] | None = None,
        train_dataset: Any = None,
        reward_funcs: Any = None,
        trainer_class: type[SDPOTrainer] = SDPOTrainer,
        trainer_kwargs: dict[str, Any] | None = None,
        **config: Any,
    ) -> SDPOTrainer:
        given = iter(range(10**9))

        def scripted_reward(completions: list[Any], **_: Any) -> list[Any]:
            return [rewards[next(given) % len(rewards)] for _ in completions]

        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_steps": 1,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            "lr_scheduler_type": "constant",
        }
        settings.update(config)
        if train_dataset is None:
            train_dataset = Dataset.from_dict({"prompt": list(prompts), **(columns or {})})
        trainer = trainer_class(
            model=make_model(tokenizer) if model is None else model,
            reward_funcs=scripted_reward if reward_funcs is None else reward_funcs,
            args=SDPOConfig(**settings),
            train_dataset=train_dataset,
            **{"processing_class": tokenizer, **(trainer_kwargs or {})},
        )
        if script is not None:
            trainer.generator = ScriptedGenerator(tokenizer, script, is_truncated=truncated)
        return trainer

    return make
