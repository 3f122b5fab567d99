"""A training script written for `trl.experimental.sdpo`; only the package it imports from is an argument.

    python peer_script.py PACKAGE MODEL_FOLDER OUTPUT_FOLDER

The model folder holds a small causal language model with its tokenizer. One run after another, since settings exclude
each other; between them they set every documented field. Prints one line of JSON: by run, the names of the metrics
that were logged; the hooks that were called with a good payload; and all fields that were set.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

PACKAGE, MODEL, OUTPUT = sys.argv[1:4]
package = importlib.import_module(PACKAGE)
SDPOConfig, SDPOTrainer = package.SDPOConfig, package.SDPOTrainer

torch.set_num_threads(1)

TEXTS = Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5", "w6", "w7 w8"], "answer": ["w1", "w4", "w6", "w7"]})
CHATS = Dataset.from_dict(
    {
        "prompt": [
            [{"role": "system", "content": "w9"}, {"role": "user", "content": "w1 w2"}],
            [
                {"role": "user", "content": "w3"},
                {"role": "assistant", "content": "w4"},
                {"role": "user", "content": "w5"},
            ],
        ],
        "privileged_context": ["w10 w11", None],
        "answer": ["w1", "w5"],
    }
)


# --- what a user brings ----------------------------------------------------------------------------------------------


def even_length(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **kwargs: Any) -> list[float]:
    """1 for a completion of an even number of tokens."""
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer)
    assert kwargs["trainer_state"].global_step >= 0
    return [float(len(ids) % 2 == 0) for ids in completion_ids]


def distinct_words(completions: Any, **kwargs: Any) -> list[float | None]:
    """Share of different words; not defined for an empty completion."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [len(set(text.split())) / len(text.split()) if text.split() else None for text in texts]


class Alternating:
    """1 for every second completion, so that every group has successes and failures."""

    def __init__(self) -> None:
        self.__name__ = "alternating"

    def __call__(self, completions: Any, **kwargs: Any) -> list[float]:
        return [float(i % 2 == 0) for i in range(len(completions))]


class Hooks(TrainerCallback):
    """The documented hooks; a payload with another name or shape raises."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_generation_batch_built(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any,
        processing_class: Any,
        generate_every: int,
        steps_per_generation: int,
    ) -> None:
        assert steps_per_generation == args.steps_per_generation
        assert generate_every == args.steps_per_generation * args.num_iterations
        self.seen.append("on_generation_batch_built")

    def on_teacher_context_built(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any,
        processing_class: Any,
        teacher_input_ids: Any,
        teacher_attention_mask: Any,
        completion_mask: Any,
        self_distillation_mask: Any,
    ) -> None:
        num_rows, length = completion_mask.shape
        assert teacher_input_ids.shape == teacher_attention_mask.shape and teacher_input_ids.shape[0] == num_rows
        assert teacher_input_ids.shape[1] > length
        assert self_distillation_mask.shape == (num_rows,)
        assert set(self_distillation_mask.tolist()) <= {0.0, 1.0}
        self.seen.append("on_teacher_context_built")

    def on_self_distillation_batch_prepared(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any,
        processing_class: Any,
        prompt_ids: Any,
        completion_ids: Any,
        old_per_token_logps: Any,
        teacher_input_ids: Any,
        teacher_attention_mask: Any,
        self_distillation_mask: Any,
    ) -> None:
        num_rows, length = completion_ids.shape
        assert prompt_ids.shape[0] == teacher_input_ids.shape[0] == num_rows
        assert teacher_input_ids.shape == teacher_attention_mask.shape
        assert torch.equal(teacher_input_ids[:, -length:], completion_ids)
        assert self_distillation_mask.shape == (num_rows,)
        is_reused = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) != 0
        assert (old_per_token_logps is not None) == is_reused
        assert old_per_token_logps is None or old_per_token_logps.shape == completion_ids.shape
        assert processing_class.decode(completion_ids[0]) is not None and model.config is not None
        self.seen.append("on_self_distillation_batch_prepared")


# --- the runs --------------------------------------------------------------------------------------------------------

FIELDS: set[str] = set()


def config(name: str, **settings: Any) -> Any:
    common: dict[str, Any] = {
        "output_dir": str(Path(OUTPUT) / name),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    values = {**common, **settings}
    FIELDS.update(values)
    return SDPOConfig(**values)


def by_path_with_defaults(name: str) -> Any:
    hooks = Hooks()
    trainer = SDPOTrainer(
        model=MODEL,
        reward_funcs=even_length,
        args=config(name, gradient_checkpointing=True),
        train_dataset=TEXTS,
        callbacks=[hooks],
    )
    trainer.train()
    assert hooks.seen.count("on_generation_batch_built") == 2
    assert len(set(hooks.seen)) == 3
    folder = Path(OUTPUT) / "exported"
    trainer.save_model(str(folder))
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(exported.lm_head.weight, trainer.model.lm_head.weight)
    assert not list(folder.glob("*teacher*"))
    return trainer


def policy_gradient_with_reward_model(name: str) -> Any:
    judge = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1)
    trainer = SDPOTrainer(
        MODEL,
        [even_length, Alternating(), judge],
        config(
            name,
            distillation_weight=0.0,
            beta=0.001,
            epsilon=0.1,
            epsilon_high=0.28,
            importance_sampling_level="sequence",
            loss_type="grpo",
            scale_rewards="batch",
            reward_weights=[1.0, 0.5, 0.1],
            num_iterations=2,
            dataloader_drop_last=True,
        ),
        TEXTS,
        reward_processing_classes=[None, None, AutoTokenizer.from_pretrained(MODEL)],
    )
    trainer.train()
    return trainer


def blend_in_a_block_of_two_steps(name: str) -> Any:
    trainer = SDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL),
        reward_funcs=[Alternating(), distinct_words],
        args=config(
            name,
            distillation_weight=0.5,
            teacher_model_kind="live",
            loss_type="dr_grpo",
            scale_rewards=False,
            steps_per_generation=2,
            distillation_is_clip=1.5,
            mask_truncated_completions=True,
            average_tokens_across_devices=True,
            success_reward_threshold=1.5,
        ),
        train_dataset=TEXTS,
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        callbacks=[Hooks()],
    )
    trainer.train()
    return trainer


def all_logits_of_a_frozen_teacher(name: str) -> Any:
    optimizer_model = AutoModelForCausalLM.from_pretrained(MODEL)
    optimizer = torch.optim.SGD(optimizer_model.parameters(), lr=1e-2)
    trainer = SDPOTrainer(
        model=optimizer_model,
        reward_funcs=Alternating(),
        args=config(
            name,
            distillation_mode="full_logits",
            distillation_alpha=0.5,
            teacher_model_kind="base",
            loss_type="bnpo",
            scale_rewards="none",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
        ),
        train_dataset=CHATS,
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    )
    trainer.train()
    return trainer


def top_k_with_a_tail(name: str) -> Any:
    trainer = SDPOTrainer(
        model=MODEL,
        reward_funcs=[Alternating()],
        args=config(
            name,
            distillation_mode="topk_logits",
            distillation_topk=100,
            distillation_add_tail=True,
            distillation_alpha=0.0,
            distillation_is_clip=None,
            teacher_model_kind="ema",
            teacher_update_rate=0.1,
            teacher_sync_steps=2,
            generation_batch_size=8,
            scale_rewards=True,
            loss_type="dapo",
        ),
        train_dataset=TEXTS,
    )
    trainer.train()
    return trainer


def adapter(name: str) -> Any:
    trainer = SDPOTrainer(
        model=MODEL,
        reward_funcs=[Alternating()],
        args=config(name, distillation_weight=0.5, teacher_model_kind="ema"),
        train_dataset=TEXTS,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model(str(Path(OUTPUT) / "adapter"))
    assert (Path(OUTPUT) / "adapter" / "adapter_config.json").exists()
    return trainer


def feedback_in_the_teachers_prompt(name: str) -> Any:
    trainer = SDPOTrainer(
        model=MODEL,
        reward_funcs=[Alternating()],
        args=config(
            name,
            include_environment_feedback=True,
            environment_feedback_only_without_solution=True,
            use_successful_as_teacher=True,
            dont_reprompt_on_self_success=False,
            remove_thinking_from_demonstration=True,
            success_reward_threshold=1.0,
            max_reprompt_len=128,
            reprompt_template="{prompt} {solution} {feedback} w12",
            solution_template=" w13 {successful_previous_attempt} w14",
            feedback_template=" w15 {feedback_raw} w16",
            chat_template_kwargs={"enable_thinking": False},
            diagnostics_warning_interval=1,
            diagnostics_flat_tolerance=1e-6,
        ),
        train_dataset=CHATS,
        callbacks=[Hooks()],
    )
    trainer.train()
    return trainer


def sampling_and_evaluation(name: str) -> Any:
    trainer = SDPOTrainer(
        model=MODEL,
        reward_funcs=[Alternating(), distinct_words],
        args=config(
            name,
            temperature=0.7,
            top_p=0.95,
            top_k=50,
            min_p=0.01,
            repetition_penalty=1.05,
            generation_kwargs={"suppress_tokens": [3, 4]},
            cache_implementation="dynamic",
            model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"},
            trust_remote_code=False,
            disable_dropout=False,
            max_prompt_length=4,
            shuffle_dataset=False,
            remove_unused_columns=False,
            ds3_gather_for_generation=True,
            num_generations_eval=2,
            per_device_eval_batch_size=4,
            eval_strategy="steps",
            eval_steps=1,
        ),
        train_dataset=CHATS,
        eval_dataset=CHATS,
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"])
    return trainer


def without_vllm_though_its_fields_are_set(name: str) -> Any:
    trainer = SDPOTrainer(
        model=MODEL,
        reward_funcs=[Alternating()],
        args=config(
            name,
            use_vllm=False,
            use_teacher_server=False,
            vllm_mode="colocate",
            vllm_model_impl="vllm",
            vllm_enable_sleep_mode=False,
            vllm_server_base_url=None,
            vllm_server_host="0.0.0.0",
            vllm_server_port=8001,
            vllm_group_port=51217,
            vllm_server_timeout=120.0,
            vllm_tensor_parallel_size=1,
            vllm_gpu_memory_utilization=0.5,
            vllm_max_model_length=512,
        ),
        train_dataset=TEXTS,
    )
    trainer.train()
    return trainer


RUNS = (
    by_path_with_defaults,
    policy_gradient_with_reward_model,
    blend_in_a_block_of_two_steps,
    all_logits_of_a_frozen_teacher,
    top_k_with_a_tail,
    adapter,
    feedback_in_the_teachers_prompt,
    sampling_and_evaluation,
    without_vllm_though_its_fields_are_set,
)


def main() -> None:
    logged: dict[str, list[str]] = {}
    for run in RUNS:
        trainer = run(run.__name__)
        assert trainer.state.global_step == 2
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
        logged[run.__name__] = sorted({key for entry in trainer.state.log_history for key in entry})
    print(json.dumps({"runs": logged, "fields": sorted(FIELDS)}))


if __name__ == "__main__":
    main()
