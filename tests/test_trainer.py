"""The stages together, on a two-layer model with scripted completions."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from conftest import ScriptedGenerator, TrainerFactory, make_model
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback

from sdpo import Score, SDPOConfig, SDPOTrainer
from sdpo.metrics import StageClock


def parameters_of(trainer: SDPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


class Hooks(TrainerCallback):
    """Keeps what the hooks were given."""

    def __init__(self) -> None:
        self.payloads: dict[str, list[dict[str, Any]]] = {}

    def _keep(self, name: str, payload: dict[str, Any]) -> None:
        self.payloads.setdefault(name, []).append(payload)

    def on_generation_batch_built(self, **payload: Any) -> None:
        self._keep("built", payload)

    def on_teacher_context_built(self, **payload: Any) -> None:
        self._keep("contexts", payload)

    def on_self_distillation_batch_prepared(self, args: Any, state: Any, control: Any, **payload: Any) -> None:
        self._keep("prepared", payload)


# --- blocks and steps ------------------------------------------------------------------------------


def test_a_block_serves_steps_per_generation_times_num_iterations_microbatches(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(
        prompts=["w10", "w11", "w12", "w13"],
        steps_per_generation=2,
        num_iterations=2,
        gradient_accumulation_steps=2,
        max_steps=4,
    )
    trainer.train()
    # 4 steps of 2 microbatches are 8; a block serves 2 x 2 of them: 2 blocks of 2 x 4 rows
    assert [len(call) for call in trainer.generator.calls] == [8, 8]
    seen = [tuple(ids) for call in trainer.generator.calls for ids in call]
    assert {prompt: seen.count(prompt) for prompt in set(seen)} == {prompt: 4 for prompt in set(seen)}
    assert len(set(seen)) == 4


def test_one_step_may_span_several_blocks(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(prompts=["w10", "w11"], steps_per_generation=1, gradient_accumulation_steps=2)
    trainer.train()
    assert [len(call) for call in trainer.generator.calls] == [4, 4]


def test_the_old_logps_are_there_only_where_a_block_outlives_a_step(make_trainer: TrainerFactory) -> None:
    for num_iterations, is_reused in ((1, False), (2, True)):
        hooks = Hooks()
        trainer = make_trainer(num_iterations=num_iterations, trainer_kwargs={"callbacks": [hooks]})
        trainer.train()
        assert (hooks.payloads["prepared"][0]["old_per_token_logps"] is not None) == is_reused


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_one_update_whatever_the_cut_into_accumulation_and_microbatches(
    make_trainer: TrainerFactory, loss_type: str, weight: float
) -> None:
    script = ["w1", "w2", "w3", "w4", *(f"w{i} w{i + 1} w{i + 2} w{i + 3} w5 w6 w7" for i in range(4))]
    results = []
    for batch, accumulation in ((8, 1), (4, 2), (2, 4), (1, 8)):
        trainer = make_trainer(
            script=script,
            rewards=(1.0, 0.0, 0.0, 0.5, 0.0, 1.0, 0.2, 0.0),
            prompts=["w10 w11", "w12 w13 w14"],
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            loss_type=loss_type,
            distillation_weight=weight,
            shuffle_dataset=False,
            optim="sgd",
            max_grad_norm=0.0,
            learning_rate=0.1,
        )
        start = parameters_of(trainer)
        trainer.train()
        logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
        results.append((parameters_of(trainer) - start, logged["loss"]))
    first, loss = results[0]
    assert first.abs().max() > 1e-4
    for update, other in results[1:]:
        assert (update - first).abs().max() < 1e-6
        assert other == pytest.approx(loss, abs=1e-6)


def test_the_logged_loss_is_the_blend_of_the_logged_terms(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(distillation_weight=0.5, rewards=(1.0, 0.0, 0.3, 0.0), num_iterations=2, max_steps=2)
    trainer.train()
    for entry in [entry for entry in trainer.state.log_history if "loss" in entry]:
        policy, distillation = (entry[f"self_distillation/{name}_loss"] for name in ("policy", "distillation"))
        assert entry["loss"] == pytest.approx(0.5 * policy + 0.5 * distillation, abs=1e-6)


def test_rows_without_context_do_not_dilute_the_loss(make_trainer: TrainerFactory) -> None:
    losses = []
    for prompts, rewards in ((["w10"], (1.0, 0.0, 0.0, 0.0)), (["w10", "w11"], (1.0, 0.0, 0.0, 0.0, 0, 0, 0, 0))):
        trainer = make_trainer(
            prompts=prompts,
            rewards=rewards,
            per_device_train_batch_size=4 * len(prompts),
            shuffle_dataset=False,
        )
        trainer.train()
        entry = trainer.state.log_history[0]
        assert entry["loss"] == pytest.approx(entry["self_distillation/distillation_loss"], abs=1e-7)
        losses.append(entry["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_all_truncated_and_masked_gives_loss_zero_and_no_update(make_trainer: TrainerFactory) -> None:
    for weight in (0.0, 0.5, 1.0):
        trainer = make_trainer(
            truncated=True, mask_truncated_completions=True, distillation_weight=weight, weight_decay=0.0
        )
        start = parameters_of(trainer)
        trainer.train()
        entry = trainer.state.log_history[0]
        assert entry["loss"] == 0.0 and entry["grad_norm"] == 0.0
        assert torch.equal(parameters_of(trainer), start)
        assert entry["completions/clipped_ratio"] == 1.0


def test_truncated_completions_exist_though_no_loss_sees_them(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(truncated=True, mask_truncated_completions=True)
    [batch] = trainer.collect([trainer.train_dataset[0]] * 4, "train")
    assert batch.completion_mask.sum(1).tolist() == [3, 2, 4, 2]
    assert not batch.policy_mask.any() and not batch.distillation_mask.any()


def test_beta_acts(make_trainer: TrainerFactory) -> None:
    updates = []
    for beta in (0.0, 100.0):
        trainer = make_trainer(
            beta=beta, distillation_weight=0.0, max_steps=2, rewards=(1.0, 0.0, 0.0, 0.0), num_iterations=2
        )
        trainer.train()
        updates.append(parameters_of(trainer))
        if beta:
            first, second = (e["kl"] for e in trainer.state.log_history if "loss" in e)
            assert first == 0.0 and second > 0.0
    assert (updates[0] - updates[1]).abs().max() > 1e-5


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_importance_ratio_is_exactly_one_at_the_first_inner_step(
    make_trainer: TrainerFactory, temperature: float
) -> None:
    hooks = Hooks()
    trainer = make_trainer(temperature=temperature, num_iterations=2, trainer_kwargs={"callbacks": [hooks]})
    [batch] = trainer.collect([trainer.train_dataset[0]] * 4, "train")
    [again] = trainer._add_logps([batch], "train")
    assert torch.equal(batch.old_logps, again.old_logps)
    prompt = trainer.tokenizer.encode(["w10 w11 w12"])[0]
    logits = trainer.model(torch.tensor([prompt])).logits[0, -1] / temperature
    expected = logits.log_softmax(-1)[batch.completion_ids[1, 0]]
    assert batch.old_logps[1, 0].item() == pytest.approx(expected.item(), abs=1e-5)


# --- teacher -----------------------------------------------------------------------------------------


def test_the_only_success_of_a_group_teaches_the_others(make_trainer: TrainerFactory) -> None:
    for dont_reprompt, expected in ((True, [0, 1, 1, 1]), (False, [1, 1, 1, 1])):
        hooks = Hooks()
        trainer = make_trainer(dont_reprompt_on_self_success=dont_reprompt, trainer_kwargs={"callbacks": [hooks]})
        trainer.train()
        [payload] = hooks.payloads["contexts"]
        assert payload["self_distillation_mask"].tolist() == expected
        assert set(payload) == {
            *("args", "state", "control", "model", "processing_class"),
            *("teacher_input_ids", "teacher_attention_mask", "completion_mask", "self_distillation_mask"),
        }
        assert trainer.state.log_history[0]["self_distillation/lone_success_fraction"] == 1.0


def test_the_teacher_reads_the_siblings_success_and_the_same_completion(
    make_trainer: TrainerFactory, tokenizer: Any
) -> None:
    hooks = Hooks()
    trainer = make_trainer(trainer_kwargs={"callbacks": [hooks]}, reprompt_template="{prompt} {solution}")
    trainer.train()
    [payload] = hooks.payloads["contexts"]
    ids, mask = payload["teacher_input_ids"][1], payload["teacher_attention_mask"][1]
    text = tokenizer.decode(ids[mask.bool()])
    assert text.startswith("w10 w11 w12") and "w1 w2 w3" in text and text.endswith("w4 w5 <eos>")


def test_feedback_reaches_the_attempt_it_is_about_and_no_success(make_trainer: TrainerFactory, tokenizer: Any) -> None:
    hooks = Hooks()
    scores = [Score(1.0, "w20"), Score(0.0, "w21"), {"reward": 0.0, "feedback": "w22"}, {"score": 0.0}]
    trainer = make_trainer(
        rewards=scores,
        include_environment_feedback=True,
        use_successful_as_teacher=False,
        trainer_kwargs={"callbacks": [hooks]},
    )
    trainer.train()
    [payload] = hooks.payloads["contexts"]
    assert payload["self_distillation_mask"].tolist() == [0, 1, 1, 0]
    texts = [tokenizer.decode(row) for row in payload["teacher_input_ids"]]
    found = [[word for word in ("w20", "w21", "w22") if word in text.split()] for text in texts]
    assert found == [[], ["w21"], ["w22"], []]


def test_privileged_context_that_is_switched_off_is_told_once(
    make_trainer: TrainerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(columns={"privileged_context": ["w30"]}, max_steps=3)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert sum("include_environment_feedback=False" in r.getMessage() for r in caplog.records) == 1


def test_ema_follows_at_its_rate(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(teacher_update_rate=0.05, learning_rate=0.1, optim="sgd")
    old = [p.detach().clone() for p in trainer.teacher.parts[0][0].parameters()]
    trainer.train()
    for before, teacher, student in zip(
        old, trainer.teacher.parts[0][0].parameters(), trainer.model.parameters(), strict=True
    ):
        assert torch.allclose(teacher, 0.95 * before + 0.05 * student, atol=1e-7, rtol=1.2e-7)  # one ulp


def test_ema_waits_for_its_sync_steps(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(teacher_sync_steps=3, max_steps=2)
    start = parameters_of(trainer)
    trainer.train()
    assert torch.equal(torch.cat([p.flatten() for p in trainer.teacher.parts[0][0].parameters()]), start)


@pytest.mark.parametrize("kind", ["ema", "base"])
def test_the_teacher_starts_as_the_student_in_memory(make_trainer: TrainerFactory, tokenizer: Any, kind: str) -> None:
    model = make_model(tokenizer)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    trainer = make_trainer(model=model, teacher_model_kind=kind)
    student, teacher = dict(model.named_parameters()), dict(trainer.teacher.parts[0][0].named_parameters())
    assert max((student[name] - teacher[name]).abs().max() for name in student) == 0.0
    assert all(not p.requires_grad for p in teacher.values())
    trainer.create_optimizer()
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not optimized & {id(p) for p in teacher.values()}


def test_a_frozen_teacher_stays_and_a_live_one_is_the_student(make_trainer: TrainerFactory) -> None:
    base = make_trainer(teacher_model_kind="base")
    start = parameters_of(base)
    base.train()
    assert torch.equal(torch.cat([p.flatten() for p in base.teacher.parts[0][0].parameters()]), start)
    live = make_trainer(teacher_model_kind="live")
    live.train()
    assert live.teacher.parts[0][0] is live.model


def test_without_distillation_there_is_no_teacher(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(distillation_weight=0.0)
    assert trainer.teacher is None
    trainer.train()
    assert "self_distillation/distillation_loss" not in trainer.state.log_history[0]


# --- rewards and logs --------------------------------------------------------------------------------


def test_a_row_without_reward_is_out_of_the_policy_loss(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(rewards=(None, -1.0, -1.0, -0.5), distillation_weight=0.0)
    [batch] = trainer.collect([trainer.train_dataset[0]] * 4, "train")
    # mean -0.8333, std 0.2887: (-0.1667, -0.1667, 0.3333) / 0.2888
    assert batch.advantages.tolist() == pytest.approx([0.0, -0.577, -0.577, 1.154], abs=1e-3)
    assert batch.policy_mask.any(1).tolist() == [False, True, True, True]


def test_a_step_without_any_reward_leaves_no_nan_in_the_log(make_trainer: TrainerFactory) -> None:
    rewards = [None] * 4 + [1.0, 0.0, 0.0, float("nan")]
    trainer = make_trainer(rewards=rewards, max_steps=2, logging_steps=2, distillation_weight=0.5)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["self_distillation/rewards/scripted_reward"] == pytest.approx(1 / 3)
    assert not any(isinstance(value, float) and math.isnan(value) for value in entry.values())
    never = make_trainer(rewards=[None])
    never.train()
    assert never.state.log_history[0]["self_distillation/rewards/scripted_reward"] is None


def test_a_failing_reward_names_itself_and_the_step(make_trainer: TrainerFactory) -> None:
    def broken(completions: list[Any], **_: Any) -> list[float]:
        raise KeyError("no such key")

    with pytest.raises(RuntimeError, match=r"broken.*step"):
        make_trainer(reward_funcs=broken).train()


def test_reward_columns_survive_remove_unused_columns(make_trainer: TrainerFactory) -> None:
    seen = []

    def by_answer(prompts: Any, completions: Any, completion_ids: Any, answer: Any, trainer_state: Any) -> list[float]:
        seen.append(answer)
        return [1.0, 0.0, 0.0, 0.0]

    trainer = make_trainer(
        reward_funcs=by_answer,
        columns={"answer": ["yes"], "other": ["no"]},
        remove_unused_columns=True,
    )
    assert trainer.columns == sorted(trainer.columns) and "other" not in trainer.columns
    trainer.train()
    assert seen == [["yes"] * 4]


def test_degenerate_runs_are_told(make_trainer: TrainerFactory, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(rewards=(0.0,), max_steps=3, distillation_weight=0.5, diagnostics_warning_interval=2).train()
    told = [
        r.message for r in caplog.records if "No completion reached success_reward_threshold=1.0" in r.getMessage()
    ]
    assert len(told) == 2  # the first, and the second in a row
    caplog.clear()
    make_trainer(rewards=(0.0,), max_steps=2, diagnostics_warning_interval=0).train()
    assert "No completion reached" not in caplog.text


def told(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def test_an_evaluation_that_is_not_finite_is_logged_and_told_once(
    make_trainer: TrainerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """A step of training with such a loss ends the run: tests/test_guard.py."""
    questions = Dataset.from_dict({"prompt": ["w10 w11 w12"]})
    trainer = make_trainer(distillation_weight=0.5, trainer_kwargs={"eval_dataset": questions})
    with torch.no_grad():
        trainer.model.lm_head.weight[20].fill_(math.nan)
    for found in (trainer.evaluate(), trainer.evaluate()):
        assert math.isnan(found["eval_self_distillation/distillation_loss"])
        assert math.isnan(found["eval_self_distillation/policy_loss"])
        assert found["eval_reward"] == 0.25
    assert told(caplog, "Not finite at step 0") == 1


def test_a_context_that_does_not_fit_is_not_counted_as_shown(
    make_trainer: TrainerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(rewards=[Score(1.0), *[Score(0.0, "w20")] * 3], include_environment_feedback=True)
    trainer.train()
    assert told(caplog, "trains on nothing") == 0
    cut = make_trainer(
        rewards=[Score(1.0), *[Score(0.0, "w20")] * 3], include_environment_feedback=True, max_reprompt_len=3
    )
    cut.train()
    names = ("success_sample", "feedback_used", "reprompt_sample", "feedback_available", "success_group")
    shares = [[t.state.log_history[0][f"self_distillation/{name}_fraction"] for name in names] for t in (trainer, cut)]
    assert shares == [[0.75, 0.75, 0.75, 0.75, 1.0], [0.0, 0.0, 0.0, 0.75, 1.0]]
    assert told(caplog, "trains on nothing") == 1


def test_a_run_that_distills_nothing_is_told(make_trainer: TrainerFactory, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(truncated=True).train()
    assert told(caplog, "trains on nothing") == 0
    make_trainer(truncated=True, mask_truncated_completions=True).train()
    assert told(caplog, "trains on nothing") == 1
    make_trainer(diagnostics_flat_tolerance=0.75).train()  # 3 of 4 rows have a context
    assert told(caplog, "trains on nothing") == 2
    make_trainer(distillation_weight=0.0, rewards=(0.0,)).train()
    assert told(caplog, "trains on nothing") == 2


def test_no_success_is_told_only_where_a_success_would_be_shown(
    make_trainer: TrainerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(rewards=(0.0,), distillation_weight=0.0).train()
    feedback_only = {"use_successful_as_teacher": False, "include_environment_feedback": True}
    make_trainer(rewards=[Score(0.0, "w20")], **feedback_only).train()
    assert told(caplog, "No completion reached") == 0
    make_trainer(rewards=(0.0,)).train()
    assert told(caplog, "No completion reached") == 1


def test_time_is_logged_by_the_steps_of_this_run(make_trainer: TrainerFactory, tmp_path: Any) -> None:
    class Counting(StageClock):
        """Keeps by how many steps it divided."""

        def __init__(self) -> None:
            super().__init__()
            self.divisors: list[int] = []

        def per_step(self) -> dict[str, float]:
            self.divisors.append(self._num_steps)
            return super().per_step()

    trainer = make_trainer(max_steps=4, logging_steps=2, save_strategy="steps", save_steps=2)
    trainer.clock = Counting()
    trainer.train()
    trainer.train()
    assert trainer.clock.divisors == [2, 2, 0] * 2  # the last is the log at the end of a run
    resumed = make_trainer(max_steps=4, logging_steps=2, save_strategy="steps", save_steps=2)
    resumed.clock = Counting()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert resumed.clock.divisors == [2, 0]


def test_a_distinct_prompt_is_encoded_once_in_a_block(
    make_trainer: TrainerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for prompt in ("w10 w11", [{"role": "user", "content": "w10 w11"}]):
        trainer = make_trainer(prompts=[prompt])
        original, encoded = trainer.tokenizer._encode_one, []
        monkeypatch.setattr(trainer.tokenizer, "_encode_one", lambda p, o=original, e=encoded: (e.append(p), o(p))[1])
        trainer.collect([trainer.train_dataset[0]] * 4, "train")
        shown = [prompt for prompt in encoded if "Correct solution" in str(prompt)]
        assert len(shown) == 1, "three rows are shown the same demonstration"


def test_the_documented_metrics_are_logged(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(distillation_weight=0.5)
    trainer.train()
    prefix = "self_distillation/"
    names = [
        *(f"{prefix}{n}" for n in ("distillation_loss", "policy_loss", "reward_mean", "reward_std", "reward_min")),
        *(f"{prefix}{n}" for n in ("reward_max", "group_reward_std_mean", "flat_group_fraction")),
        *(f"{prefix}{n}" for n in ("success_group_fraction", "success_sample_fraction", "feedback_used_fraction")),
        *(f"{prefix}{n}" for n in ("feedback_available_fraction", "reprompt_sample_fraction")),
        f"{prefix}rewards/scripted_reward",
        *(f"completions/{n}_length" for n in ("mean", "min", "max", "mean_terminated", "min_terminated")),
        *("completions/max_terminated_length", "completions/clipped_ratio"),
        *("reward", "reward_std", "rewards/scripted_reward/mean", "entropy", "credit/mean"),
        *("time/generation", "time/scoring", "time/contexts", "time/collation", "time/train"),
    ]
    assert [name for name in names if name not in trainer.state.log_history[0]] == []


# --- data ----------------------------------------------------------------------------------------------


def test_a_stream_gives_the_blocks_of_a_map_style_dataset(make_trainer: TrainerFactory) -> None:
    prompts = [f"w{i}" for i in range(10, 16)]
    calls = []
    for dataset in (
        Dataset.from_dict({"prompt": prompts}),
        Dataset.from_dict({"prompt": prompts}).to_iterable_dataset(),
    ):
        trainer = make_trainer(
            train_dataset=dataset, max_steps=3, gradient_accumulation_steps=2, shuffle_dataset=False
        )
        trainer.train()
        calls.append(trainer.generator.calls)
    assert isinstance(dataset, IterableDataset)
    assert calls[0] == calls[1]
    assert [len(call) for call in calls[0]] == [8, 8, 8]


def test_the_dataset_is_the_same_after_a_step(make_trainer: TrainerFactory) -> None:
    rows = [{"prompt": [{"role": "user", "content": "w10"}], "answer": ["w1"]} for _ in range(2)]
    before = copy.deepcopy(rows)

    def meddling(prompts: Any, completions: Any, **_: Any) -> list[float]:
        for prompt in prompts:
            prompt.append({"role": "user", "content": "w39"})
        return [1.0, 0.0, 0.0, 0.0]

    make_trainer(train_dataset=rows, reward_funcs=meddling).train()
    assert rows == before


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.from_dict({"question": ["a"], "answer": ["b"]}), r"'prompt'.*\['answer', 'question'\]"),
        (Dataset.from_dict({"prompt": []}), "train_dataset is empty"),
        (Dataset.from_dict({"prompt": ["w1", None]}), "1"),
        (Dataset.from_dict({"prompt": ["w1", ""]}), "1"),
        (Dataset.from_dict({"question": ["a"]}).to_iterable_dataset(), "'prompt'"),
    ],
)
def test_a_dataset_that_cannot_work_is_refused_at_construction(
    make_trainer: TrainerFactory, dataset: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(train_dataset=dataset)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(make_trainer: TrainerFactory, tokenizer: Any) -> None:
    model = make_model(tokenizer)
    model.resize_token_embeddings(20)
    with pytest.raises(ValueError, match=r"embeddings for 20 tokens"):
        make_trainer(model=model)
    with pytest.raises(ValueError, match="distillation_topk=1000"):
        make_trainer(distillation_mode="topk_logits", distillation_topk=1000)


def test_without_args_the_defaults_are_used(tokenizer: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = SDPOTrainer(
        model=make_model(tokenizer),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["w1"]}),
        processing_class=tokenizer,
    )
    assert isinstance(trainer.args, SDPOConfig) and trainer.args.num_generations == 8


def test_rewards_are_required(tokenizer: Any) -> None:
    for missing in (None, []):
        with pytest.raises(ValueError, match="reward"):
            SDPOTrainer(
                model=make_model(tokenizer),
                reward_funcs=missing,
                train_dataset=Dataset.from_dict({"prompt": ["w1"]}),
                processing_class=tokenizer,
            )


# --- evaluation ----------------------------------------------------------------------------------------


def test_evaluation_with_one_generation_is_finite_and_has_no_advantage(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(
        num_generations_eval=1, distillation_weight=0.5, prompts=["w10", "w11", "w12"], per_device_eval_batch_size=2
    )
    metrics = trainer.evaluate(trainer.train_dataset)
    assert math.isfinite(metrics["eval_loss"])
    assert metrics["eval_self_distillation/policy_loss"] == pytest.approx(0.0, abs=1e-7)
    [batch] = trainer.collect([trainer.train_dataset[0]], "eval")
    assert batch.advantages.tolist() == [0.0]


@pytest.mark.parametrize("batch_size", [1, 3, 6, 8])
def test_any_evaluation_batch_size_gives_the_same_loss(make_trainer: TrainerFactory, batch_size: int) -> None:
    trainer = make_trainer(
        num_generations_eval=4, prompts=["w10", "w11", "w12"], per_device_eval_batch_size=batch_size
    )
    metrics = trainer.evaluate(trainer.train_dataset)
    reference = make_trainer(num_generations_eval=4, prompts=["w10", "w11", "w12"], per_device_eval_batch_size=4)
    assert metrics["eval_loss"] == pytest.approx(reference.evaluate(reference.train_dataset)["eval_loss"], abs=1e-6)
    assert sum(len(call) for call in trainer.generator.calls) == 12


def test_a_rank_without_rows_evaluates_nothing(make_trainer: TrainerFactory) -> None:
    def by_answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [1.0 for _ in answer]

    hooks = Hooks()
    trainer = make_trainer(
        reward_funcs=by_answer, distillation_weight=0.5, beta=0.1, trainer_kwargs={"callbacks": [hooks]}
    )
    assert trainer.collect([], "eval") == []
    assert len(hooks.payloads["prepared"]) == 1


def test_evaluation_before_training_uses_the_initial_policy_as_teacher(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer()
    start = parameters_of(trainer)
    metrics = trainer.evaluate(trainer.train_dataset)
    assert math.isfinite(metrics["eval_loss"])
    assert torch.equal(torch.cat([p.flatten() for p in trainer.teacher.parts[0][0].parameters()]), start)


def test_the_best_model_can_be_chosen_by_a_trainer_metric(make_trainer: TrainerFactory, tokenizer: Any) -> None:
    trainer = make_trainer(
        prompts=["w10", "w11"],
        trainer_kwargs={"eval_dataset": Dataset.from_dict({"prompt": ["w10"]})},
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_only_model=True,
        max_steps=2,
        metric_for_best_model="reward",
        greater_is_better=True,
        per_device_eval_batch_size=4,
    )
    trainer.train()
    assert trainer.state.best_metric == 0.25


# --- sampling ------------------------------------------------------------------------------------------


def test_the_models_generation_config_is_left_alone_and_does_not_act(
    make_trainer: TrainerFactory, tokenizer: Any
) -> None:
    model = make_model(tokenizer)
    model.generation_config.top_k = 1
    model.generation_config.suppress_tokens = [5]
    before = model.generation_config.to_dict()
    trainer = make_trainer(script=None, model=model, max_steps=1)
    torch.manual_seed(0)
    completions = trainer.generator.generate([[10, 11]] * 64)
    assert len({tuple(c.ids) for c in completions}) > 1, "top_k 1 of the model's own config would make them equal"
    trainer.train()
    assert model.generation_config.to_dict() == before


def test_every_end_token_ends_a_completion(make_trainer: TrainerFactory, tokenizer: Any) -> None:
    model = make_model(tokenizer)
    model.generation_config.eos_token_id = list(range(2, 60))  # nearly every token ends
    trainer = make_trainer(script=None, model=model, max_completion_length=16)
    trainer.train()
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 0.0


def test_the_end_token_counts_where_it_is_also_the_padding(make_trainer: TrainerFactory, tokenizer: Any) -> None:
    from conftest import make_tokenizer

    same = make_tokenizer()
    same.pad_token = same.eos_token
    trainer = make_trainer(model=make_model(same), script=None)
    trainer.processing_class = same
    rows = [[7, 8, 1], [7, 8, 9, 10, 11, 1], [7, 1], [7, 1]]
    padded = [row + [1] * (6 - len(row)) for row in rows]
    assert [len(trainer.generator._cut(row).ids) for row in padded] == [3, 6, 2, 2]
    scripted = ScriptedGenerator(same, ["w1 w2", "w1 w2 w3 w4 w5", "w1", "w2"])
    trainer.generator = scripted
    [batch] = trainer.collect([trainer.train_dataset[0]] * 4, "train")
    assert batch.completion_mask.sum(1).tolist() == [3, 6, 2, 2]


def test_real_sampling_trains(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(script=None, max_steps=2, prompts=["w10", "w11 w12"])
    start = parameters_of(trainer)
    trainer.train()
    assert not torch.equal(parameters_of(trainer), start)


@pytest.mark.parametrize("kind", ["ema", "live", "trust_region"])
def test_in_mixed_precision_teacher_and_reference_compute_as_the_student_does(make_trainer: Any, kind: str) -> None:
    trainer = make_trainer(
        bf16=True, teacher_model_kind=kind, distillation_weight=0.5, beta=0.1, num_iterations=2, max_steps=2
    )
    dtypes: dict[str, set[torch.dtype]] = {}
    copies = [part for part, _ in trainer.teacher.parts] + [trainer.reference.model]
    for number, model in enumerate([trainer.model, *copies]):
        layer = model.get_decoder().layers[0].mlp

        def note(_: Any, __: Any, output: torch.Tensor, number: int = number) -> None:
            dtypes.setdefault(f"model {number}", set()).add(output.dtype)

        layer.register_forward_hook(note)
    trainer.train()
    assert dtypes and all(found == {torch.bfloat16} for found in dtypes.values()), dtypes


def test_a_compiled_model_trains_as_an_eager_one_and_is_compiled_once(make_trainer: TrainerFactory) -> None:
    counted = torch._dynamo.utils.counters["stats"]

    class Graphs(TrainerCallback):
        def __init__(self) -> None:
            self.numbers: list[int] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.numbers.append(counted["unique_graphs"])

    found = {}
    # The backend only decides what a graph becomes; this one needs no compiler of the machine.
    for options in ({}, {"torch_compile_backend": "aot_eager"}):
        torch._dynamo.reset()
        counted.clear()
        graphs = Graphs()
        trainer = make_trainer(
            max_steps=4, optim="sgd", learning_rate=0.1, trainer_kwargs={"callbacks": [graphs]}, **options
        )
        trainer.train()
        found[bool(options)] = (parameters_of(trainer), graphs.numbers)
    assert found[False][1] == [0] * 4
    first, second, *later = found[True][1]
    assert first > 0 and later == [second, second], "two steps know the shapes; later ones compile nothing"
    assert torch.allclose(found[True][0], found[False][0], atol=1e-6)


@pytest.mark.parametrize("kind", ["ema", "live"])
def test_gradient_checkpointing_recomputes_and_changes_nothing(make_trainer: TrainerFactory, kind: str) -> None:
    found, calls = {}, {}
    for is_on in (False, True):
        trainer = make_trainer(
            gradient_checkpointing=is_on, teacher_model_kind=kind, max_steps=2, optim="sgd", learning_rate=0.1
        )
        number = 0

        def count(*_: Any) -> None:
            nonlocal number
            number += torch.is_grad_enabled()

        trainer.model.get_decoder().layers[0].mlp.register_forward_pre_hook(count)
        trainer.train()
        found[is_on], calls[is_on] = parameters_of(trainer), number
    assert calls == {False: 2, True: 4}, "a layer is read once a step, and once more in the backward pass"
    assert torch.equal(found[True], found[False])
