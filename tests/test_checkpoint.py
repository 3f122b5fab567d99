"""A run that is interrupted and resumed is the same run, and a checkpoint has its name only when complete."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TrainerFactory, make_model
from datasets import Dataset
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig
from transformers import AutoModelForCausalLM, TrainerCallback

from sdpo import SDPOTrainer
from sdpo.checkpoint import REPLACED, UNFINISHED, publish, put_back

LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}


def reward_by_length(completions: list[Any], **_: Any) -> list[float]:
    """Half of the completions of a group succeed or so; it depends on nothing but them."""
    return [float(len(text.split()) % 2) for text in completions]


def state_of(trainer: SDPOTrainer) -> dict[str, torch.Tensor]:
    tensors = {f"student {n}": p.detach().clone() for n, p in trainer.model.named_parameters()}
    for number, (part, _) in enumerate(trainer.teacher.parts if trainer.teacher else []):
        tensors |= {f"teacher {number} {n}": p.detach().clone() for n, p in part.named_parameters()}
    return tensors


def losses_of(trainer: SDPOTrainer) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


SETTINGS: dict[str, Any] = {
    "script": None,
    "reward_funcs": reward_by_length,
    "prompts": [f"w{i} w{i + 1}" for i in range(6)],
    "per_device_train_batch_size": 4,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 6,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
}
FEW_PROMPTS = [f"w{i} w{i + 1}" for i in range(3)]
CASES = {
    "ema": {},
    "second epoch": {"prompts": FEW_PROMPTS},
    "second pass of a shuffled stream": {
        "train_dataset": Dataset.from_dict({"prompt": FEW_PROMPTS})
        .to_iterable_dataset()
        .shuffle(seed=1, buffer_size=4),
    },
    "base": {"teacher_model_kind": "base"},
    "live": {"teacher_model_kind": "live"},
    "trust region": {"teacher_model_kind": "trust_region"},
    "policy with reference": {"distillation_weight": 0.5, "beta": 0.1},
    "inside a block": {"steps_per_generation": 4, "num_iterations": 2, "gradient_accumulation_steps": 2},
    "rare log": {"logging_steps": 4, "steps_per_generation": 2},
    "LoRA": {"adapter": LoraConfig(**LORA)},
    "LoRA, trust region": {"adapter": LoraConfig(**LORA), "teacher_model_kind": "trust_region"},
    "LoRA, inside a block": {"adapter": LoraConfig(**LORA), "steps_per_generation": 3},
}


def build(make_trainer: TrainerFactory, case: dict[str, Any], folder: Path, **more: Any) -> SDPOTrainer:
    settings = {**SETTINGS, **case, **more}
    adapter = settings.pop("adapter", None)
    return make_trainer(**settings, output_dir=str(folder), trainer_kwargs={"peft_config": adapter})


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_bitwise_the_straight_one(make_trainer: TrainerFactory, tmp_path: Path, case: str) -> None:
    straight = build(make_trainer, CASES[case], tmp_path / "straight")
    straight.train()
    for stop in (1, 3, 5):
        resumed = build(make_trainer, CASES[case], tmp_path / "resumed")
        torch.manual_seed(stop)  # the process that resumes has drawn other numbers
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{stop}"))
        expected = state_of(straight)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state_of(resumed).items())
        assert losses_of(resumed) == losses_of(straight)


def test_the_mean_loss_of_a_resumed_run_is_that_of_its_own_steps(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    """Four steps, a log every three: the checkpoint of step 2 holds the losses of steps 1 and 2 for the next log."""
    case = {"logging_steps": 1, "max_steps": 4}
    straight = build(make_trainer, case, tmp_path / "straight")
    straight.train()
    own = [loss for step, loss in losses_of(straight) if step > 2]
    resumed = build(make_trainer, {**case, "logging_steps": 3}, tmp_path / "again")
    resumed.train()
    last = build(make_trainer, {**case, "logging_steps": 3}, tmp_path / "resumed")
    output = last.train(resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-2"))
    assert output.training_loss == pytest.approx(sum(own) / 2, abs=1e-6)
    assert losses_of(last)[-1][1] == pytest.approx(losses_of(resumed)[-1][1], abs=1e-6)


def test_a_checkpoint_of_another_library_is_refused_with_the_way_out(
    make_trainer: TrainerFactory, tmp_path: Path
) -> None:
    trainer = build(make_trainer, {}, tmp_path / "run", max_steps=1)
    trainer.train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-1" / "sdpo")
    with pytest.raises(ValueError, match=r"holds no teacher.*pass model="):
        build(make_trainer, {}, tmp_path / "run", max_steps=2).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", ["rank0.pt", "teacher.safetensors"])
def test_a_checkpoint_that_lost_a_file_is_called_damaged(
    make_trainer: TrainerFactory, tmp_path: Path, name: str
) -> None:
    build(make_trainer, {}, tmp_path / "run", max_steps=1).train()
    (tmp_path / "run" / "checkpoint-1" / "sdpo" / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing: the checkpoint is damaged"):
        build(make_trainer, {}, tmp_path / "run", max_steps=2).train(resume_from_checkpoint=True)


def test_other_settings_that_would_change_the_run_are_refused(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    build(make_trainer, {}, tmp_path / "run", max_steps=1).train()
    other = build(make_trainer, {"gradient_accumulation_steps": 2}, tmp_path / "run", max_steps=2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps: 1 there, 2 here"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"max_completion_length": 4},
        {"loss_type": "grpo"},
        {"scale_rewards": "none"},
        {"generation_kwargs": {"top_p": 0.5}},
        {"teacher_dtype": "bfloat16"},
    ],
)
def test_what_the_block_in_use_and_the_loss_come_from_must_stay(
    make_trainer: TrainerFactory, tmp_path: Path, change: dict[str, Any]
) -> None:
    build(make_trainer, {}, tmp_path / "run", max_steps=1).train()
    [name] = change
    with pytest.raises(ValueError, match=f"{name}: .* there, .* here"):
        build(make_trainer, change, tmp_path / "run", max_steps=2).train(resume_from_checkpoint=True)


def test_rates_lengths_and_logs_of_a_run_may_change_when_it_is_resumed(
    make_trainer: TrainerFactory, tmp_path: Path
) -> None:
    build(make_trainer, {}, tmp_path / "run", max_steps=1).train()
    change = {"learning_rate": 1e-4, "epsilon": 0.1, "teacher_update_rate": 0.1, "logging_steps": 2, "save_steps": 2}
    resumed = build(make_trainer, change, tmp_path / "run", max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


def test_a_run_after_a_resume_that_failed_is_one_of_its_own(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no tracker")

    build(make_trainer, {}, tmp_path / "run", max_steps=1).train()
    completions = []
    for seed in (0, 1):
        trainer = build(make_trainer, {}, tmp_path / "again", max_steps=1)
        trainer.add_callback(Fails)
        with pytest.raises(OSError, match="no tracker"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
        trainer.remove_callback(Fails)
        torch.manual_seed(seed)
        trainer.train()
        completions.append(trainer.block.batches[0].completion_ids)
    assert not torch.equal(*completions), "the random state of the checkpoint was put back"


@pytest.mark.parametrize("has_successor", [True, False])
def test_a_kill_while_a_checkpoint_replaces_another_loses_none(
    make_trainer: TrainerFactory, tmp_path: Path, has_successor: bool
) -> None:
    run = tmp_path / "run"
    build(make_trainer, {}, run, max_steps=1).train()
    old = run / f"{REPLACED}checkpoint-1"
    if has_successor:  # killed while the older one was deleted
        shutil.copytree(run / "checkpoint-1", old)
    else:  # killed between the two renames
        (run / "checkpoint-1").rename(old)
    resumed = build(make_trainer, {}, run, max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert losses_of(resumed)[0][0] == 1, "it went on from the checkpoint"
    assert {path.name for path in run.iterdir()} == {"checkpoint-1", "checkpoint-2"}


def test_a_checkpoint_replaces_one_of_its_name_whatever_lies_beside_it(tmp_path: Path) -> None:
    for name in ("staged", "checkpoint-7", f"{REPLACED}checkpoint-7", f"{REPLACED}checkpoint-9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "from").write_text(name)
    publish(tmp_path / "staged", tmp_path / "checkpoint-7")
    put_back(tmp_path)
    found = {path.name: (path / "from").read_text() for path in tmp_path.iterdir()}
    assert found == {"checkpoint-7": "staged", "checkpoint-9": f"{REPLACED}checkpoint-9"}


def test_after_a_failed_save_the_trainer_pushes_and_names_as_before(
    make_trainer: TrainerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(make_trainer, {}, tmp_path / "run", max_steps=1)

    def no_space(folder: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(trainer, "_save_rng_state", no_space)
    with pytest.raises(OSError, match="no space left"):
        trainer.train()
    assert trainer._get_output_dir(None) == str(tmp_path / "run")


def test_an_interrupted_save_leaves_the_last_checkpoint_the_last(
    make_trainer: TrainerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(make_trainer, {}, tmp_path / "run", max_steps=3)
    original = SDPOTrainer._save_rng_state

    def killed_at_two(self: SDPOTrainer, folder: str) -> None:
        if self.state.global_step == 2:
            raise KeyboardInterrupt
        original(self, folder)

    monkeypatch.setattr(SDPOTrainer, "_save_rng_state", killed_at_two)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    monkeypatch.undo()
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"checkpoint-1", UNFINISHED}
    straight = build(make_trainer, {}, tmp_path / "straight", max_steps=3)
    straight.train()
    resumed = build(make_trainer, {}, tmp_path / "run", max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    expected = state_of(straight)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state_of(resumed).items())
    assert UNFINISHED not in {path.name for path in (tmp_path / "run").iterdir()}


def test_the_exported_model_is_the_student_alone(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    trainer = build(make_trainer, {}, tmp_path / "run", max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "export"))
    files = {path.name for path in (tmp_path / "export").iterdir()}
    assert not any("teacher" in name or name == "sdpo" for name in files)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "export").named_parameters())
    assert all(torch.equal(p, loaded[name]) for name, p in trainer.model.named_parameters())
    adapter = build(make_trainer, {"adapter": LoraConfig(**LORA)}, tmp_path / "lora", max_steps=1)
    adapter.train()
    adapter.save_model(str(tmp_path / "adapter"))
    base = make_model(adapter.processing_class)
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")
    mine = {n: p for n, p in adapter.model.named_parameters() if "lora" in n}
    assert all(torch.equal(p, mine[n]) for n, p in again.named_parameters() if "lora" in n)
    assert not [path for path in (tmp_path / "adapter").rglob("*") if "teacher" in path.name]


def test_limits_and_best_model_work_on_finished_names(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    trainer = make_trainer(
        **{**SETTINGS, "max_steps": 4},
        output_dir=str(tmp_path / "run"),
        trainer_kwargs={"eval_dataset": Dataset.from_dict({"prompt": ["w10 w11"]})},
        eval_strategy="steps",
        eval_steps=1,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="reward",
        per_device_eval_batch_size=4,
    )
    trainer.train()
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    best = Path(trainer.state.best_model_checkpoint)
    assert len(names) == 2 and "checkpoint-4" in names and best.name in names and best.parent == tmp_path / "run"
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)


def test_save_only_model_cannot_be_resumed_and_says_so(
    make_trainer: TrainerFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(make_trainer, {"save_only_model": True}, tmp_path / "run", max_steps=1)
    assert "save_only_model=True" in caplog.text
    trainer.train()
    with pytest.raises(ValueError, match="save_only_model"):
        build(make_trainer, {}, tmp_path / "run", max_steps=2).train(resume_from_checkpoint=True)


def test_an_error_in_a_reward_leaves_the_last_checkpoint_usable(make_trainer: TrainerFactory, tmp_path: Path) -> None:
    calls = iter(range(100))

    def breaks_at_the_third(completions: list[Any], **_: Any) -> list[float]:
        if next(calls) == 2:
            raise OSError("no answer")
        return reward_by_length(completions)

    trainer = build(make_trainer, {"reward_funcs": breaks_at_the_third}, tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"breaks_at_the_third.*step 2"):
        trainer.train()
    resumed = build(make_trainer, {}, tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6 and math.isfinite(losses_of(resumed)[-1][1])


# --- every kind of adapter -----------------------------------------------------------------------

ADAPTERS = {
    "LoRA": LoraConfig(**LORA),
    "rsLoRA": LoraConfig(**LORA, use_rslora=True),
    "DoRA": LoraConfig(**LORA, use_dora=True),
    "PiSSA": LoraConfig(**{**LORA, "init_lora_weights": "pissa"}),
    "OLoRA": LoraConfig(**{**LORA, "init_lora_weights": "olora"}),
    "rank pattern": LoraConfig(**LORA, rank_pattern={"q_proj": 4}),
    "modules to save": LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "bias": LoraConfig(**LORA, bias="all"),
    "trainable tokens": LoraConfig(**LORA, trainable_token_indices=[10, 11]),
    "LoRA on the head": LoraConfig(**{**LORA, "target_modules": ["q_proj", "lm_head"]}),
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "IA3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_teacher_of_any_adapter_starts_equal_moves_at_its_rate_and_shares_the_base(
    make_trainer: TrainerFactory, tokenizer: Any, kind: str
) -> None:
    trainer = make_trainer(
        trainer_kwargs={"peft_config": ADAPTERS[kind]}, learning_rate=0.1, optim="sgd", teacher_update_rate=0.05
    )
    [(teacher, _)] = trainer.teacher.parts
    student, copies = dict(trainer.model.named_parameters()), dict(teacher.named_parameters())
    trained = [name for name, p in student.items() if p.requires_grad]
    assert trained and set(student) == set(copies)
    assert max((student[n] - copies[n]).abs().max().item() for n in student) == 0.0
    ids = torch.tensor([[10, 11, 12, 13]])
    trainer.model.eval()
    assert torch.equal(trainer.model(input_ids=ids).logits, teacher(input_ids=ids).logits)
    assert all(copies[n] is p for n, p in student.items() if not p.requires_grad), "the base is not copied"
    assert all(copies[n] is not student[n] and not copies[n].requires_grad for n in trained)
    before = {n: p.detach().clone() for n, p in student.items()}
    trainer.train()
    moved = [n for n in trained if not torch.equal(before[n], student[n])]
    assert moved
    for name in trained:
        expected = 0.95 * before[name] + 0.05 * student[name]
        assert (copies[name] - expected).abs().max() <= 1.2e-7 * (1 + expected.abs().max())


def test_an_adapter_that_was_trained_before_is_where_the_teacher_starts(
    make_trainer: TrainerFactory, tokenizer: Any, tmp_path: Path
) -> None:
    from peft import get_peft_model

    model = get_peft_model(make_model(tokenizer), LoraConfig(**LORA))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    for kind in ("ema", "base", "trust_region"):
        trainer = make_trainer(model=model, teacher_model_kind=kind)
        teacher = dict(trainer.teacher.parts[0][0].named_parameters())
        assert max((p - teacher[n]).abs().max() for n, p in model.named_parameters()) == 0.0


def test_the_teachers_lora_update_is_a_twentieth_of_the_students(make_trainer: TrainerFactory) -> None:
    """From B = 0 the product B A moves by B_s A_0 to first order, so the averaged factors give 0.05 of it."""
    trainer = make_trainer(
        trainer_kwargs={"peft_config": LoraConfig(**LORA)}, learning_rate=1e-2, teacher_update_rate=0.05
    )
    trainer.train()
    student, teacher = (dict(m.named_parameters()) for m in (trainer.model, trainer.teacher.parts[0][0]))
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    products = [p[f"{prefix}B.default.weight"] @ p[f"{prefix}A.default.weight"] for p in (student, teacher)]
    ratio = (products[1].norm() / products[0].norm()).item()
    assert 0.045 < ratio < 0.055


# --- precision and mixtures ------------------------------------------------------------------------


@pytest.mark.parametrize("is_rounded_when_placed", [False, True])
def test_the_average_of_a_bfloat16_student_does_not_stall(tokenizer: Any, is_rounded_when_placed: bool) -> None:
    """After 60 updates at rate 0.05 towards a weight 1 % away, 0.95 ** 60 = 4.6 % of the distance is left.

    Also where student and copy become bfloat16 only when training places them, in place, as DeepSpeed does it.
    """
    from sdpo.teacher import EMATeacher

    model = make_model(tokenizer)
    if not is_rounded_when_placed:
        model.to(torch.bfloat16)
    teacher = EMATeacher(model, rate=0.05, sync_steps=1, dtype=None)
    for module in (model, teacher.copy.model):
        module.to(torch.bfloat16)
    teacher.start()
    start = [p.detach().float().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    for step in range(1, 61):
        teacher.update(step)
    ends = [p.detach().float() for p in model.parameters()]
    left = sum((a - e).abs().sum().item() for a, e in zip(teacher.state_dict().values(), ends, strict=True))
    whole = sum((s - e).abs().sum().item() for s, e in zip(start, ends, strict=True))
    assert left / whole == pytest.approx(0.95**60, rel=0.02)
    assert all(p.dtype == torch.bfloat16 for p in teacher.copy.model.parameters())


def test_the_teachers_dtype_can_be_chosen(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(teacher_dtype="bfloat16")
    trainer.train()
    assert all(p.dtype == torch.bfloat16 for p in trainer.teacher.parts[0][0].parameters())
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    with pytest.raises(ValueError, match="teacher_dtype"):
        make_trainer(teacher_dtype="bfloat16", teacher_model_kind="live")


def test_the_reference_is_the_teachers_initial_policy_where_it_keeps_one(make_trainer: TrainerFactory) -> None:
    for kind, is_shared in (("base", True), ("trust_region", True), ("ema", False)):
        trainer = make_trainer(teacher_model_kind=kind, beta=0.1, distillation_weight=0.5)
        assert (trainer.reference is trainer.teacher.initial) == is_shared
