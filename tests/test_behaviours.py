"""What users of trainers of this kind have tripped over, at the level of the trainer."""

from __future__ import annotations

import asyncio
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHAT_TEMPLATE, TrainerFactory, make_model, make_tokenizer
from datasets import Dataset
from peft import IA3Config, LoraConfig, get_peft_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, HfArgumentParser, TrainerCallback

from sdpo import Score, SDPOConfig, SDPOTrainer
from sdpo.types import TrainingBatch


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Shown:
    """What callbacks are shown of a block: ids of each row's prompts and completion, and who is distilled."""

    student_prompts: list[list[int]]
    teacher_prompts: list[list[int]]
    completions: list[list[int]]
    is_distilled: list[bool]


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.payload: dict[str, Any] = {}

    def on_teacher_context_built(self, args: Any, state: Any, control: Any, **payload: Any) -> None:
        self.payload.update(payload)

    def on_self_distillation_batch_prepared(self, args: Any, state: Any, control: Any, **payload: Any) -> None:
        self.payload.update(payload)

    def shown(self) -> Shown:
        found = self.payload
        completion_mask, length = found["completion_mask"].bool(), found["completion_mask"].shape[1]
        pad = found["processing_class"].pad_token_id
        teachers = zip(found["teacher_input_ids"], found["teacher_attention_mask"].bool(), strict=True)
        completions = zip(found["completion_ids"], completion_mask, strict=True)
        return Shown(
            [[i for i in ids if i != pad] for ids in found["prompt_ids"].tolist()],
            [ids[:-length][mask[:-length]].tolist() for ids, mask in teachers],
            [ids[mask].tolist() for ids, mask in completions],
            found["self_distillation_mask"].bool().tolist(),
        )


def block_of(trainer: SDPOTrainer) -> list[TrainingBatch]:
    return trainer.collect([next(iter(trainer.train_dataset))] * 4, "train")


def shown_of(trainer: SDPOTrainer) -> Shown:
    """The block of the first prompt; the script begins anew after it."""
    recorder = Recorder()
    trainer.add_callback(recorder)
    block_of(trainer)
    trainer.remove_callback(recorder)
    trainer.generator.num_given = 0
    return recorder.shown()


def logged(trainer: SDPOTrainer) -> dict[str, Any]:
    return next(entry for entry in trainer.state.log_history if "loss" in entry)


# --- rewards -----------------------------------------------------------------------------------------


def by_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) > 3) for ids in completion_ids]  # script with ends: 4, 3, 5, 3 tokens


async def by_length_awaited(completion_ids: list[list[int]], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return by_length(completion_ids)


class ByLengthAwaited:
    async def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        return await by_length_awaited(completion_ids)


def test_async_rewards_train_to_the_same_weights_as_sync_ones(make_trainer: TrainerFactory) -> None:
    results = []
    for function in (by_length, by_length_awaited, ByLengthAwaited(), functools.partial(by_length_awaited, extra=1)):
        trainer = make_trainer(reward_funcs=[function], distillation_weight=0.5)
        trainer.train()
        assert logged(trainer)["reward"] == 0.5
        results.append(trainer.model.lm_head.weight.detach().clone())
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_a_reward_function_with_too_few_values_is_named_with_both_numbers(make_trainer: TrainerFactory) -> None:
    def lazy(completions: Any, **_: Any) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match=r"`lazy` returned 1 rewards for 4 completions"):
        make_trainer(reward_funcs=lazy).train()


def test_a_reward_that_is_a_string_is_refused_by_name(make_trainer: TrainerFactory) -> None:
    def wordy(completions: Any, **_: Any) -> list[str]:
        return ["1.0"] * len(completions)

    with pytest.raises(TypeError, match=r"`wordy`, completion 0: str '1.0'"):
        make_trainer(reward_funcs=wordy).train()


def test_a_failing_reward_leaves_the_checkpoint_before_it_whole(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    is_broken = True

    def fails_once(completions: Any, trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 1 and is_broken:
            raise ConnectionError("the grader is away")
        return [1.0, 0.0, 0.0, 0.0]

    settings = {"reward_funcs": fails_once, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(RuntimeError, match=r"`fails_once` raised ConnectionError at step 1: the grader is away"):
        make_trainer(**settings).train()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-1"]
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert all(torch.isfinite(p).all() for p in AutoModelForCausalLM.from_pretrained(checkpoint).parameters())
    is_broken = False
    resumed = make_trainer(**settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 2


def test_one_nan_of_two_functions_leaves_everything_finite(make_trainer: TrainerFactory) -> None:
    def partly(completions: Any, **_: Any) -> list[float]:
        return [0.5, float("nan"), 0.0, 1.0]

    trainer = make_trainer(reward_funcs=[by_length, partly], distillation_weight=0.5)
    # sums: 1 + 0.5, 0 (the other function's), 1 + 0, 0 + 1
    [batch] = block_of(trainer)
    assert torch.isfinite(batch.advantages).all()
    trainer.generator.num_given = 0
    trainer.train()
    assert logged(trainer)["reward"] == pytest.approx((1.5 + 0.0 + 1.0 + 1.0) / 4)
    assert math.isfinite(logged(trainer)["loss"]) and math.isfinite(logged(trainer)["grad_norm"])
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


# --- prompts -----------------------------------------------------------------------------------------


def test_a_prefilled_answer_is_continued_by_student_and_teacher(make_trainer: TrainerFactory, tokenizer: Any) -> None:
    prompt = [user("w10 w11"), {"role": "assistant", "content": "w20 w21"}]
    trainer = make_trainer(prompts=[prompt])
    shown = shown_of(trainer)
    end = tokenizer("<|assistant|> w20 w21", add_special_tokens=False)["input_ids"]
    for ids in [*shown.student_prompts, *shown.teacher_prompts]:
        assert ids[-3:] == end
    assert shown.is_distilled == [False, True, True, True]
    taught = tokenizer.decode(shown.teacher_prompts[1])
    assert "w1 w2 w3" in taught and taught.index("w1 w2 w3") < taught.index("<|assistant|>")
    trainer.train()
    assert math.isfinite(logged(trainer)["loss"])


def test_a_tool_turn_is_answered_by_student_and_teacher(make_trainer: TrainerFactory, tokenizer: Any) -> None:
    prompt = [
        user("w10 w11"),
        {"role": "assistant", "content": "w20"},
        {"role": "tool", "content": "w30 w31"},
    ]
    trainer = make_trainer(prompts=[prompt])
    shown = shown_of(trainer)
    end = tokenizer("<|tool|> w30 w31 <|end|> <|assistant|>", add_special_tokens=False)["input_ids"]
    for ids in [*shown.student_prompts, *shown.teacher_prompts]:
        assert ids[-5:] == end
    assert "w1 w2 w3" in tokenizer.decode(shown.teacher_prompts[1])
    trainer.train()
    assert math.isfinite(logged(trainer)["loss"])


def test_text_parts_reach_the_teacher_as_text(make_trainer: TrainerFactory, tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "w10 w"}, {"type": "text", "text": "11 w12"}]
    trainer = make_trainer(prompts=[[{"role": "system", "content": [{"type": "text", "text": "w9"}]}, user(parts)]])
    shown = shown_of(trainer)
    for ids in [*shown.student_prompts, *shown.teacher_prompts]:
        text = tokenizer.decode(ids)
        assert text.startswith("<|system|> w9 <|end|> <|user|> w10 w11 w12"), text
        assert "type" not in text and tokenizer.unk_token_id not in shown.student_prompts[0]
    assert "w1 w2 w3" in tokenizer.decode(shown.teacher_prompts[1])


def test_system_and_earlier_turns_are_the_same_for_the_teacher(make_trainer: TrainerFactory, tokenizer: Any) -> None:
    prompt = [
        {"role": "system", "content": "w9"},
        user("w10"),
        {"role": "assistant", "content": "w11"},
        user("w12"),
    ]
    shown = shown_of(make_trainer(prompts=[prompt]))
    before = tokenizer("<|system|> w9 <|end|> <|user|> w10 <|end|> <|assistant|> w11 <|end|> <|user|> w12")
    length = len(before["input_ids"])
    for ids in shown.teacher_prompts:
        assert ids[:length] == before["input_ids"]


def test_a_long_prompt_is_cut_from_the_left_and_said_once(
    make_trainer: TrainerFactory, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    long, short = [user(" ".join(f"w{i}" for i in range(10, 20)))], [user("w1")]
    trainer = make_trainer(
        prompts=[long, short, long, long],
        max_prompt_length=6,
        per_device_train_batch_size=8,
        max_steps=2,
        shuffle_dataset=False,
    )
    with caplog.at_level("WARNING"):
        trainer.train()
    for ids in trainer.generator.calls[0][:4]:
        assert tokenizer.decode(ids) == "w16 w17 w18 w19 <|end|> <|assistant|>"
    told = [record.getMessage() for record in caplog.records if "max_prompt_length" in record.getMessage()]
    assert len(told) == 1 and "4 of 8 prompts" in told[0]
    fractions = [e["prompts/truncated_fraction"] for e in trainer.state.log_history if "loss" in e]
    assert fractions == [0.5, 1.0]


@pytest.mark.parametrize("prompt", ["w10 w11", [user("w10 w11")]])
@pytest.mark.parametrize("template", ["{{ bos_token }} " + CHAT_TEMPLATE, CHAT_TEMPLATE])
def test_student_and_teacher_prompts_have_at_most_one_bos(
    make_trainer: TrainerFactory, prompt: Any, template: str
) -> None:
    with_bos = make_tokenizer()
    with_bos.add_special_tokens({"bos_token": "<bos>"})
    with_bos.chat_template = template
    bos = with_bos.bos_token_id
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    trainer = make_trainer(prompts=[prompt], model=make_model(with_bos), trainer_kwargs={"processing_class": with_bos})
    shown = shown_of(trainer)
    expected = 1 if isinstance(prompt, str) or "bos_token" in template else 0
    for ids in [*shown.student_prompts, *shown.teacher_prompts]:
        assert ids.count(bos) == expected and ids[:expected] == [bos] * expected


def test_messages_need_a_chat_template(make_trainer: TrainerFactory) -> None:
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"has no chat template"):
        make_trainer(prompts=[[user("w10")]], trainer_kwargs={"processing_class": bare})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reprompt_template": "{solution}{feedback}"}, r"must contain \{prompt\}"),
        ({"generation_kwargs": {"temprature": 0.5}}, r"'temprature'.*temperature"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_a_model_is_touched(
    make_trainer: TrainerFactory, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(model="no/such/model", **settings)


@pytest.mark.parametrize("empty", [None, "", []])
def test_a_row_without_a_prompt_is_named(make_trainer: TrainerFactory, empty: Any) -> None:
    with pytest.raises(ValueError, match=r"the prompt of row 1 is empty: " + repr(empty).replace("[", r"\[")):
        make_trainer(train_dataset=[{"prompt": "w1"}, {"prompt": empty}])


def test_a_stream_with_an_empty_prompt_further_on_is_refused_when_it_comes(make_trainer: TrainerFactory) -> None:
    stream = Dataset.from_dict({"prompt": ["w1", ""]}).to_iterable_dataset()
    trainer = make_trainer(train_dataset=stream, max_steps=2)
    with pytest.raises(ValueError, match="is empty: ''"):
        trainer.train()


def test_a_stream_begins_anew_when_it_ends(make_trainer: TrainerFactory) -> None:
    # 3 prompts, 2 a step: the second step takes the last prompt of a pass and the first of the next
    stream = Dataset.from_dict({"prompt": ["w1", "w2", "w3"]}).to_iterable_dataset()
    trainer = make_trainer(train_dataset=stream, max_steps=3, gradient_accumulation_steps=2, steps_per_generation=1)
    trainer.train()
    assert trainer.state.global_step == 3
    assert [call[0] for call in trainer.generator.calls] == [[9], [10], [11]] * 2


def test_data_that_end_before_the_first_step_are_refused(make_trainer: TrainerFactory) -> None:
    rows = Dataset.from_dict({"prompt": ["w1"]})
    for dataset in (rows, rows.to_iterable_dataset()):
        trainer = make_trainer(
            train_dataset=dataset, dataloader_drop_last=True, per_device_train_batch_size=8, max_steps=2
        )
        with pytest.raises(ValueError, match="train_dataset ends before its first optimizer step"):
            trainer.train()


def test_every_row_of_a_stream_is_evaluated(make_trainer: TrainerFactory) -> None:
    rows = Dataset.from_dict({"prompt": ["w10", "w11", "w12"]})
    trainer = make_trainer(per_device_eval_batch_size=8)
    losses = [trainer.evaluate(dataset)["eval_loss"] for dataset in (rows, rows.to_iterable_dataset())]
    assert losses[0] == pytest.approx(losses[1], abs=1e-7)
    assert [len(call) for call in trainer.generator.calls] == [8, 4] * 2


def test_predict_samples_whole_groups(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(per_device_eval_batch_size=8)
    output = trainer.predict(Dataset.from_dict({"prompt": ["w10", "w11"]}))
    assert [len(call) for call in trainer.generator.calls] == [8]
    assert math.isfinite(output.metrics["test_loss"])


# --- the teacher's prompt ----------------------------------------------------------------------------


def test_every_teacher_prompt_ends_in_the_header_of_the_answer(make_trainer: TrainerFactory, tokenizer: Any) -> None:
    header = tokenizer("<|assistant|>", add_special_tokens=False)["input_ids"]
    for length in (10240, 20):  # whole, and shortened
        shown = shown_of(make_trainer(prompts=[[user("w10 w11")]], max_reprompt_len=length))
        assert [ids[-1:] for ids in shown.teacher_prompts] == [header] * 4


def test_a_teacher_prompt_over_its_budget_loses_context_first(make_trainer: TrainerFactory, tokenizer: Any) -> None:
    prompt = [{"role": "system", "content": "w9"}, user("w10 w11 w12")]
    demonstration = " ".join(f"w{i}" for i in range(20, 40))
    scores = [Score(1.0), *[Score(0.0, "w13 " * 20)] * 3]
    trainer = make_trainer(
        script=[demonstration, "w4", "w5", "w6"],
        prompts=[prompt],
        rewards=scores,
        include_environment_feedback=True,
        max_reprompt_len=40,
        max_completion_length=32,
        reprompt_template="{prompt} {solution} {feedback} w14",
        solution_template="w15 {successful_previous_attempt} w15",
        feedback_template="w16 {feedback_raw} w16",
    )
    shown = shown_of(trainer)
    system_and_question = tokenizer("<|system|> w9 <|end|> <|user|> w10 w11 w12 w15")["input_ids"]
    end = tokenizer("w16 w14 <|end|> <|assistant|>", add_special_tokens=False)["input_ids"]
    for ids in shown.teacher_prompts[1:]:
        assert len(ids) <= 40
        assert ids[: len(system_and_question)] == system_and_question and ids[-4:] == end
        text = tokenizer.decode(ids)
        assert "w20" in text and "w39" in text and "w30" not in text  # from its middle
    trainer.train()
    assert logged(trainer)["teacher_prompts/shortened_fraction"] == 0.75


def test_literal_braces_in_prompt_feedback_and_demonstration_pass(
    make_trainer: TrainerFactory, tokenizer: Any
) -> None:
    trainer = make_trainer(
        script=["{ w1 }", "w2", "w3", "w4"],
        prompts=["{ w10 } { }"],
        rewards=[Score(1.0), *[Score(0.0, "{x} { w11 }")] * 3],
        include_environment_feedback=True,
        reprompt_template="{prompt} {solution} {feedback} {{ }}",
    )
    shown = shown_of(trainer)
    for ids in shown.teacher_prompts[1:]:
        text = tokenizer.decode(ids)
        assert text.startswith("{ w10 } { }") and "{ w1 }" in text and "{ w11 }" in text and text.endswith("{ }")


# --- loss --------------------------------------------------------------------------------------------


def test_sampled_token_logs_the_kl_estimate(make_trainer: TrainerFactory) -> None:
    """mean over tokens of log p_student - log p_teacher, the teacher being the initial student."""
    trainer = make_trainer(rewards=(1.0, 0.0, 0.0, 0.0))
    shown = shown_of(trainer)
    total, number = 0.0, 0
    with torch.no_grad():
        for i in range(1, 4):
            completion = torch.tensor(shown.completions[i])
            logps = []
            for prompt in (shown.student_prompts[i], shown.teacher_prompts[i]):
                ids = torch.tensor([[*prompt, *shown.completions[i]]])
                table = trainer.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                logps.append(table.gather(-1, completion[:, None]).sum().item())
            total += logps[0] - logps[1]
            number += len(completion)
    trainer.train()
    assert logged(trainer)["self_distillation/distillation_loss"] == pytest.approx(total / number, rel=1e-4)


def test_the_spread_is_undefined_rather_than_absent_where_nothing_terminated(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(truncated=True)
    trainer.train()
    names = [f"completions/{kind}_terminated_length" for kind in ("mean", "min", "max")]
    assert [logged(trainer)[name] for name in names] == [None, None, None]


# --- adapters ----------------------------------------------------------------------------------------


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)


ADAPTERS = {
    "lora": lambda: lora(),
    "lora with a trained copy of a module": lambda: lora(modules_to_save=["lm_head"]),
    "lora on the head": lambda: LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"),
    "lora with biases": lambda: lora(bias="all"),
    "lora with trained tokens": lambda: lora(trainable_token_indices=[10, 11]),
    "dora": lambda: lora(use_dora=True),
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
}


def adapted(tokenizer: Any, config: Any) -> Any:
    """A model whose adapter is not zero."""
    model = get_peft_model(make_model(tokenizer), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def teacher_of(trainer: SDPOTrainer) -> Any:
    [(model, share)] = trainer.teacher.parts
    assert share == 1.0
    return model


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["ema", "base"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_teacher_starts_with_the_students_adapter(
    make_trainer: TrainerFactory, tokenizer: Any, name: str, kind: str
) -> None:
    trainer = make_trainer(model=adapted(tokenizer, ADAPTERS[name]()), teacher_model_kind=kind)
    student, teacher = trainer.model, teacher_of(trainer)
    ids = torch.arange(8, 16)[None]
    with torch.no_grad():
        with student.disable_adapter():
            plain = student(ids).logits
        own = student(ids).logits
        assert not torch.equal(own, plain), "the adapter acts"
        assert torch.equal(teacher(ids).logits, own)
    taught = dict(teacher.named_parameters())
    for parameter_name, parameter in student.named_parameters():
        is_shared = taught[parameter_name] is parameter
        assert is_shared == (not parameter.requires_grad), parameter_name


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_average_follows_every_trained_parameter_at_its_rate(
    make_trainer: TrainerFactory, tokenizer: Any, name: str
) -> None:
    trainer = make_trainer(
        model=adapted(tokenizer, ADAPTERS[name]()), teacher_update_rate=0.05, learning_rate=0.05, optim="sgd"
    )
    before = trained(trainer.model)
    trainer.train()
    after, teacher = trained(trainer.model), dict(teacher_of(trainer).named_parameters())
    assert max((after[n] - before[n]).abs().max() for n in before) > 1e-4
    for parameter_name, old in before.items():
        expected = 0.95 * old + 0.05 * after[parameter_name]
        assert torch.allclose(teacher[parameter_name], expected, atol=1e-7, rtol=2e-7), parameter_name
    moved = sum((teacher[n] - before[n]).norm() for n in before) / sum((after[n] - before[n]).norm() for n in before)
    assert moved.item() == pytest.approx(0.05, rel=1e-3)


def test_a_new_adapter_is_trained_and_exported_alone(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    trainer = make_trainer(trainer_kwargs={"peft_config": lora()}, distillation_weight=0.5)
    base = trainer.model.base_model.model.lm_head.weight.detach().clone()
    before = trained(trainer.model)
    trainer.train()
    assert torch.equal(trainer.model.base_model.model.lm_head.weight, base)
    assert any(not torch.equal(before[n], p) for n, p in trained(trainer.model).items())
    trainer.save_model(str(tmp_path / "exported"))
    files = {path.name for path in (tmp_path / "exported").rglob("*")}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert not any("teacher" in name for name in files)


def test_the_reference_of_an_adapter_is_the_adapter_as_it_was(make_trainer: TrainerFactory, tokenizer: Any) -> None:
    trainer = make_trainer(
        model=adapted(tokenizer, lora()), distillation_weight=0.0, beta=0.1, max_steps=2, num_iterations=2
    )
    trainer.train()
    first, second = (entry["kl"] for entry in trainer.state.log_history if "loss" in entry)
    assert first == 0.0 and second > 0.0


# --- command line ------------------------------------------------------------------------------------


def test_the_scale_of_rewards_on_the_command_line_reaches_the_advantages(
    make_trainer: TrainerFactory, tmp_path: Path
) -> None:
    # rewards 1, 0, 0, 0: mean 1/4, unbiased std 1/2
    for text, advantage in (("group", 0.75 / 0.5001), ("none", 0.75), ("false", 0.75), ("batch", 0.75 / 0.5001)):
        command = ["--output_dir", str(tmp_path), "--scale_rewards", text]
        [parsed] = HfArgumentParser(SDPOConfig).parse_args_into_dataclasses(command)
        trainer = make_trainer(scale_rewards=parsed.scale_rewards, distillation_weight=0.5)
        assert block_of(trainer)[0].advantages[0].item() == pytest.approx(advantage, abs=1e-6)
