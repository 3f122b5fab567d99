"""Two processes that train on a group of four rows, two each, and log it. Started by test_completion_log.py."""

from __future__ import annotations

import sys

from conftest import ScriptedGenerator, make_model, make_tokenizer
from datasets import Dataset

from sdpo import SDPOConfig, SDPOTrainer

tokenizer = make_tokenizer()
rank_words = {0: ["w1 w2", "w3"], 1: ["w4", "w5 w6"]}


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(text == "w5 w6") for text in completions]


args = SDPOConfig(
    output_dir=sys.argv[1],
    per_device_train_batch_size=2,
    num_generations=4,
    max_completion_length=8,
    max_steps=2,
    logging_steps=1,
    save_strategy="no",
    use_cpu=True,
    gradient_checkpointing=False,
    log_completions=True,
)
trainer = SDPOTrainer(
    model=make_model(tokenizer),
    reward_funcs=reward,
    args=args,
    train_dataset=Dataset.from_dict({"prompt": ["w10"]}),
    processing_class=tokenizer,
)
trainer.generator = ScriptedGenerator(tokenizer, rank_words[args.process_index])
trainer.train()
