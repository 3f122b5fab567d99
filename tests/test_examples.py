"""examples/sdpo_math.py on a tiny model: its command line, and runs of it on data as GSM8K and MATH have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sdpo_math
from conftest import make_model
from datasets import Dataset

DOCUMENTED = """
    --model_name_or_path Qwen/Qwen2.5-Math-1.5B-Instruct --dataset_name openai/gsm8k --dataset_config main
    --output_dir outputs/sdpo-gsm8k --learning_rate 5e-5 --dtype bfloat16 --bf16 true --max_completion_length 128
    --use_peft --lora_target_modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj
    --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --num_generations 8 --generation_batch_size 32
    --distillation_alpha 1.0 --distillation_mode sampled_token --distillation_weight 0.5 --report_to none
    --eval_strategy steps --eval_steps 1000 --save_strategy no"""
LIBRARY_TEMPLATE = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"

GSM8K = {"question": ["w1 w2", "w3 w4", "w5"], "answer": ["w1 #### 1,234", "w2 #### 2", "w3 #### 3"]}
MATH = {
    "problem": ["w1 w2", "w3 w4", "w5"],
    "solution": [r"so $\\boxed{\\frac{1}{2}}$", r"so $\\boxed{2}$", r"so $\\boxed{3}$"],
    "level": ["w7", "w8", "w9"],
}


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_documented_command_line_parses() -> None:
    script, config, model = sdpo_math.parse(DOCUMENTED.split())
    assert (script.dataset_name, script.dataset_config, script.task) == ("openai/gsm8k", "main", None)
    assert (config.generation_batch_size, config.steps_per_generation, config.bf16) == (32, 32, True)
    assert (model.model_name_or_path, model.dtype, model.use_peft) == (
        "Qwen/Qwen2.5-Math-1.5B-Instruct", "bfloat16", True,
    )  # fmt: skip
    assert config.reprompt_template == LIBRARY_TEMPLATE


def test_a_bare_command_line_is_the_demo_and_what_it_says_wins() -> None:
    script, config, model = sdpo_math.parse([])
    assert (script.dataset_name, model.model_name_or_path, script.task) == (None, None, "sum")
    assert (config.output_dir, config.max_steps, config.distillation_topk) == ("outputs/demo", 15, 20)
    assert config.reprompt_template == "{prompt}{solution}{feedback}" and script.check_teacher
    script, config, _ = sdpo_math.parse(["--max_steps", "2", "--task=sum", "--distillation_topk", "5"])
    assert (script.task, config.max_steps, config.distillation_topk) == ("sum", 2, 5)


@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
@pytest.mark.parametrize("dash", ["_", "-"])
def test_a_model_and_a_dataset_in_any_form_are_no_demo(form: str, dash: str) -> None:
    pairs = (("--model_name_or_path", "M"), ("--dataset_name", "D"))
    words = " ".join(form.format(name.replace("_", dash).replace(dash * 2, "--"), value) for name, value in pairs)
    script, config, model = sdpo_math.parse(words.split())
    assert (model.model_name_or_path, script.dataset_name, script.task) == ("M", "D", None)
    assert (config.reprompt_template, config.max_steps) == (LIBRARY_TEMPLATE, -1)


@pytest.mark.parametrize("words", [["--model_name_or_path", "M"], ["--model_name_or_path=M"], ["--dataset_name=D"]])
def test_a_model_and_a_dataset_go_together(words: list[str]) -> None:
    with pytest.raises(ValueError, match="Name both a model and a dataset"):
        sdpo_math.parse(words)


def test_a_file_of_settings_names_both(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1.0e-6\n")
    with pytest.raises(ValueError, match="Name both a model and a dataset"):
        sdpo_math.parse(["--config", str(file)])
    file.write_text("model_name_or_path: M\ndataset_name: D\n")
    _, config, model = sdpo_math.parse(["--config", str(file)])
    assert (model.model_name_or_path, config.reprompt_template) == ("M", LIBRARY_TEMPLATE)


def test_what_the_other_kind_of_run_reads_is_refused() -> None:
    with pytest.raises(ValueError, match="--task sum cannot take effect with a dataset"):
        sdpo_math.parse(["--model_name_or_path=M", "--dataset_name=D", "--task=sum"])
    with pytest.raises(ValueError, match="--feedback_column hint cannot take effect in the demo"):
        sdpo_math.parse(["--feedback_column=hint"])


def test_an_abbreviated_name_is_refused(capsys: Any) -> None:
    with pytest.raises((SystemExit, ValueError)):
        sdpo_math.parse(["--dataset_nam", "D"])


# --- the data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "answer", "right"),
    [(GSM8K, "w1 #### 1,234", r"so \boxed{1234}"), (MATH, MATH["solution"][0], r"so \boxed{0.5}")],
)
def test_questions_become_prompts_and_answers_are_right(
    columns: dict[str, list[str]], answer: str, right: str
) -> None:
    row = sdpo_math.as_prompts(Dataset.from_dict(columns), feedback_column=None)[0]
    assert row["prompt"][0]["content"].startswith("w1 w2\n\nReason step by step")
    assert row["answer"] == answer and "privileged_context" not in row
    scores = sdpo_math.math_reward([], [right, r"so \boxed{7}"], answer=[answer, answer])
    assert [score.reward for score in scores] == [1.0, 0.0]


def test_a_feedback_column_becomes_the_context() -> None:
    rows = sdpo_math.as_prompts(Dataset.from_dict(MATH), feedback_column="level")
    assert rows["privileged_context"][:] == MATH["level"]
    with pytest.raises(ValueError, match="There is no column 'hint'"):
        sdpo_math.as_prompts(Dataset.from_dict(MATH), feedback_column="hint")


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tokenizer: Any, tmp_path: Path) -> Any:
    """Runs the script for two steps on the columns given; the trainer, with the accuracies that were written."""
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    def run(columns: dict[str, list[str]], *words: str, watch: Any = None) -> tuple[Any, dict[str, Any]]:
        (tmp_path / "data").mkdir()
        for split in ("train", "test"):
            Dataset.from_dict(columns).to_parquet(tmp_path / "data" / f"{split}.parquet")
        trainers: list[Any] = []
        line = f"""
            --model_name_or_path {tmp_path / "model"} --dataset_name {tmp_path / "data"} --output_dir
            {tmp_path / "out"} --max_steps 2 --per_device_train_batch_size 4 --num_generations 2
            --max_completion_length 4 --save_strategy no --logging_steps 1 --num_test_questions 2
            --num_test_samples 2 --gradient_checkpointing false --disable_tqdm true"""
        sdpo_math.main([*line.split(), *words], on_trainer=lambda t: (trainers.append(t), watch and watch(t)))
        return trainers[0], json.loads((tmp_path / "out" / "accuracy.json").read_text())

    return run


def test_a_run_on_questions_like_gsm8k_trains_an_adapter_in_bfloat16_on_a_cpu(run: Any, capsys: Any) -> None:
    trainer, accuracies = run(
        GSM8K, "--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--bf16", "true", "--use_cpu",
        "--distillation_weight", "0.5", "--eval_strategy", "steps", "--eval_steps", "2",
    )  # fmt: skip
    assert trainer.state.global_step == 2 and trainer.args.bf16
    assert trainer.model.peft_config["default"].target_modules == {"q_proj", "v_proj"}
    assert accuracies["accuracy_before"]["num_questions"] == accuracies["accuracy_after"]["num_questions"] == 2
    assert "held-out accuracy after" in capsys.readouterr().out
    assert "trained with SDPO" in (Path(trainer.args.output_dir) / "README.md").read_text()


def test_a_run_on_questions_like_math_shows_its_feedback_column(run: Any) -> None:
    trainer, _ = run(MATH, "--feedback_column", "level")
    assert trainer.args.include_environment_feedback
    logged = [entry for entry in trainer.state.log_history if "self_distillation/feedback_used_fraction" in entry]
    assert logged[-1]["self_distillation/feedback_used_fraction"] == 1.0


def test_accuracy_is_success_by_the_trainings_own_rule_and_columns(run: Any) -> None:
    def half(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        seen.append(set(columns))
        return [0.5] * len(completions)

    def watch(trainer: Any) -> None:
        trainer.scorer.functions = [half]
        trainer.columns = ["answer", "prompt"]
        trainer.args.success_reward_threshold = 0.5

    seen: list[set[str]] = []
    _, accuracies = run(MATH, watch=watch)
    assert accuracies["accuracy_before"]["mean"] == 1.0
    assert all("level" not in columns for columns in seen)
