"""The doctor says of a run what the run does; a config that cannot run ends with status 1 and its own words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import TrainerFactory, make_model, make_tokenizer
from peft import LoraConfig, get_peft_model

from sdpo.doctor import cost, environment, plan
from sdpo.doctor.__main__ import main


def config_file(folder: Path, **settings: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompts", [1, 3, 4, 7])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"steps_per_generation": 2},
        {"num_iterations": 2},
        {"steps_per_generation": 1, "gradient_accumulation_steps": 3},
        {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 3},
        {"num_train_epochs": 2.5},
        {"max_steps": 5},
    ],
)
def test_steps_and_generations_are_those_of_the_run(
    make_trainer: TrainerFactory, num_prompts: int, settings: dict[str, Any]
) -> None:
    settings = {"max_steps": -1, "num_train_epochs": 1, "learning_rate": 0.0, **settings}
    trainer = make_trainer(prompts=[f"w{i}" for i in range(num_prompts)], logging_strategy="no", **settings)
    found = plan.schedule_of(trainer.args, num_prompts=num_prompts)
    trainer.train()
    assert found.num_steps == trainer.state.global_step
    assert found.num_blocks == len(trainer.generator.calls)
    assert found.num_completions == sum(map(len, trainer.generator.calls))


def test_counts_by_hand() -> None:
    # 1000 prompts, 4 a block of 32: 250 blocks, each used 4 * 2 times: 2000 microbatches, 4 a step: 500 steps.
    found = cost.schedule(
        completions_per_block=32, num_generations=8, steps_per_generation=4, num_iterations=2, accumulation_steps=4,
        max_steps=-1, num_epochs=3, num_prompts=1000, drop_last=False,
    )  # fmt: skip
    assert (found.prompts_per_block, found.blocks_per_epoch, found.steps_per_epoch) == (4, 250, 500)
    assert (found.num_steps, found.num_blocks, found.num_completions) == (1500, 750, 24000)
    assert found.completions_per_step == 32  # 4 microbatches of 8


def test_what_is_not_known_is_none(tmp_path: Path) -> None:
    found = plan.schedule_of(plan.read_plan(config_file(tmp_path), num_processes=1).config, num_prompts=None)
    assert found.num_steps is None and found.steps_per_epoch is None and found.prompts_per_block == 1


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def parts_of(memory: cost.Memory) -> dict[str, int]:
    return {part.name: part.size for part in (*memory.always, *memory.sampling, *memory.training)}


def test_bytes_of_weights_and_copies_are_those_of_the_tensors(model_folder: Path, tmp_path: Path) -> None:
    path = config_file(tmp_path, model_name_or_path=str(model_folder), beta=0.1, distillation_weight=0.5)
    found = parts_of(plan.memory_of(plan.read_plan(path, num_processes=1), num_processes=1))
    size = sum(p.numel() * 4 for p in make_model(make_tokenizer()).parameters())
    assert {found[name] for name in ("weights", "gradients", "teacher", "reference policy")} == {size}
    assert found["optimizer"] == 2 * size  # two moments
    assert "teacher's average" not in found  # a float32 teacher is its own


def test_an_adapters_copies_cost_the_adapter(model_folder: Path, tmp_path: Path) -> None:
    lora = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    path = config_file(tmp_path, model_name_or_path=str(model_folder), dtype="bfloat16", **lora)
    found = parts_of(plan.memory_of(plan.read_plan(path, num_processes=1), num_processes=1))
    base = make_model(make_tokenizer())
    number = sum(p.numel() for p in base.parameters())
    peft_model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trained = sum(p.numel() for p in peft_model.parameters() if p.requires_grad)
    assert found["weights"] == 2 * (number + trained) and found["teacher"] == 4 * trained
    assert "gradient of the head" not in found


@pytest.mark.parametrize(
    ("settings", "present"),
    [
        ({"teacher_model_kind": "live"}, set()),
        ({"distillation_weight": 0.0}, set()),
        ({"teacher_model_kind": "base"}, {"teacher"}),
        ({"teacher_dtype": "bfloat16"}, {"teacher", "teacher's average"}),
        ({"teacher_model_kind": "base", "beta": 0.1, "distillation_weight": 0.5}, {"teacher"}),  # kept by it already
    ],
)
def test_a_teacher_costs_what_it_keeps(
    model_folder: Path, tmp_path: Path, settings: dict[str, Any], present: set[str]
) -> None:
    path = config_file(tmp_path, model_name_or_path=str(model_folder), **settings)
    found = parts_of(plan.memory_of(plan.read_plan(path, num_processes=1), num_processes=1))
    assert {"teacher", "teacher's average", "reference policy"} & set(found) == present


def test_the_peak_is_the_larger_of_two_phases() -> None:
    part = cost.Part("x", 5, "")
    memory = cost.Memory([part], [part, part], [part])
    assert memory.peak == 15  # 5 + max(10, 5)


def test_keys_and_values_by_hand() -> None:
    # 2 rows of 10 + 5 tokens, 3 layers, keys and values of 8 numbers each, 2 bytes
    model = cost.ModelShape(100, 100, 2, 2, 3, 16, 32, 8, 50, True)
    load = cost.Load(block_rows=2, batch_rows=1, prompt_length=10, teacher_prompt_length=20, completion_length=5)
    memory = cost.memory(
        model, load, optimizer="sgd", teacher=None, teacher_itemsize=None, has_reference=False, is_checkpointed=False,
        activation_itemsize=2, is_sampled_elsewhere=False, is_on_cpu=True,
    )  # fmt: skip
    assert parts_of(memory)["keys and values"] == 2 * 15 * 3 * 2 * 8 * 2
    assert parts_of(memory)["a chunk of logits"] == 5 * 50 * 3 * 4  # no more tokens than there are


# --- configs ---------------------------------------------------------------------------------------------------------


def test_a_config_of_several_processes_is_checked_as_they_would(tmp_path: Path) -> None:
    path = config_file(tmp_path, per_device_train_batch_size=4, generation_batch_size=40, num_generations=8)
    plan.read_plan(path, num_processes=1)  # 40 / 4
    with pytest.raises(plan.ConfigError, match=r"not divisible by the global batch .* \* 16 processes = 64"):
        plan.read_plan(path, num_processes=16)


def test_numbers_as_yaml_reads_them_and_keys_of_the_script(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("learning_rate: 1e-6\nlora_r: 8\nfeedback_column: hint\nnum_generation: 4\nenv: {A: b}\n")
    found = plan.read_plan(path, num_processes=1)  # YAML makes a text of 1e-6
    assert found.config.learning_rate == 1e-6 and found.model.lora_r == 8
    assert found.others == ["feedback_column", "num_generation"]
    assert any("did you mean `num_generations`?" in told for told in found.warnings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"distillation_topk": 5}, "distillation_topk=5 cannot take effect"),
        ({"loss_type": "ppo"}, "loss_type"),
        ({"num_generations": "many"}, "num_generations"),
        ({"alpha": 0.5}, "did you mean `distillation_alpha`"),
        (None, "holds no settings"),
    ],
)
def test_a_config_that_cannot_run_ends_with_status_1_and_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fast: None, settings: dict[str, Any] | None, words: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    assert main([str(path)]) == 1
    assert words.replace(" ", "") in "".join(capsys.readouterr().out.split())


def test_a_config_that_can_run_ends_with_status_0_and_what_it_costs(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fast: None
) -> None:
    path = config_file(tmp_path, model_name_or_path=str(model_folder), max_steps=10, seed=7, my_own=1)
    assert main([str(path), "--num-prompts", "100"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("can run", "my_own", "optimizer steps of the run", "keys and values", "peak"):
        assert words in out


def test_an_adapter_that_fits_nothing_cannot_run(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fast: None
) -> None:
    lora = {"use_peft": True, "lora_target_modules": ["nowhere", "neither"]}
    assert main([str(config_file(tmp_path, model_name_or_path=str(model_folder), **lora))]) == 1
    assert "cannot run" in " ".join(capsys.readouterr().out.split())


def test_without_a_model_the_counts_are_there_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fast: None
) -> None:
    assert main([str(config_file(tmp_path, max_steps=10))]) == 0
    assert "Memory is not known" in capsys.readouterr().out


# --- this machine ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages are imported in processes of their own, which takes long; one test below does that."""
    monkeypatch.setattr(environment, "backends", lambda found: [])
    yield


def test_versions_and_ranges_of_what_is_installed() -> None:
    found = {package.name: package for package in environment.packages()}
    assert found["torch"].version == torch.__version__ and found["torch"].is_in_range
    assert found["transformers"].wanted


def test_the_processor_is_a_device_with_memory() -> None:
    first = environment.devices()[0]
    assert first.memory is not None and first.memory > 2**28


def test_a_backend_works_where_it_can_be_imported_and_says_why_not() -> None:
    found = {package.name: package for package in environment.packages()}
    errors = {"peft": "ImportError: broken", "torch": None}
    tried = {b.name: b for b in environment.backends(found, try_import=errors.get)}
    assert tried["Training, sampling with transformers"].works
    peft = tried["Adapters (PEFT)"]
    assert (peft.works, peft.reason) == (False, "peft: ImportError: broken")
    if not torch.cuda.is_available():
        assert not tried["FlashAttention 2"].works
    outside = {**found, "peft": environment.Package("peft", "99", "<1", False)}
    tried = {b.name: b for b in environment.backends(outside, try_import=lambda _: None)}
    assert tried["Adapters (PEFT)"].works and "99 is outside <1" in tried["Adapters (PEFT)"].reason


def test_a_module_is_tried_in_a_process_of_its_own() -> None:
    assert environment.import_error("json") is None
    assert environment.import_error("json.nowhere") == "ModuleNotFoundError: No module named 'json.nowhere'"


def test_sizes_are_counted_in_whole_epochs_and_parts_of_them() -> None:
    # 3 blocks an epoch, each used twice: 6 microbatches, 4 a step: 2 steps, the second of 2 microbatches.
    assert [cost._blocks_of(steps, 3, 2, 4) for steps in range(1, 5)] == [2, 3, 5, 6]
    assert cost._blocks_of(5, None, 2, 4) == math.ceil(5 * 4 / 2)
