"""The recipes of examples/ besides sdpo_math.py: their data, their command lines, and runs of them on a tiny model."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import choice_tasks
import code_tasks
import common
import instruction_tasks
import pytest
import sdpo_code
import sdpo_instructions
import sdpo_math
import sdpo_mcq
from conftest import make_model
from datasets import Dataset, DatasetDict

from sdpo.rewards import CodeReward, InstructionReward, MultipleChoiceReward

RECIPES = [sdpo_math, sdpo_code, sdpo_instructions, sdpo_mcq]


# --- tasks of the demos ----------------------------------------------------------------------------------------------


def test_private_tests_are_others_than_public_ones_and_are_hidden_among_all() -> None:
    for function in code_tasks.FUNCTIONS:
        public, private, both = (json.loads(function.tests(which))["tests"] for which in ("public", "private", "all"))
        assert len(public) == 2 and len(private) >= 2
        assert not [test for test in private if test in public], function.name
        assert [test.pop("hidden") for test in both] == [False] * 2 + [True] * len(private)
        assert both == public + private


def test_a_right_program_passes_and_one_that_learned_the_public_answers_does_not() -> None:
    square = next(f for f in code_tasks.FUNCTIONS if f.name == "square")
    programs = ["def square(n):\n    return n * n", "def square(n):\n    return {4: 16, 7: 49}[n]"]
    public, private = (
        CodeReward()(["", ""], programs, tests=[square.tests(which)] * 2) for which in ("public", "private")
    )
    assert [score.reward for score in public] == [1.0, 1.0]
    assert [score.reward for score in private] == [1.0, 0.0]


def test_functions_are_held_out_by_the_seed_alone() -> None:
    train, held_out = code_tasks.split_functions(num_held_out=24)
    assert len(held_out) == 24 and len(train) == len(code_tasks.FUNCTIONS) - 24
    assert not {f.name for f in train} & {f.name for f in held_out}
    assert code_tasks.split_functions(num_held_out=24)[1] == held_out
    assert code_tasks.split_functions(num_held_out=24, seed=1)[1] != held_out
    with pytest.raises(ValueError, match="72 functions: 72 of them cannot be held out"):
        code_tasks.split_functions(num_held_out=72)


def test_instructions_are_read_by_the_reward() -> None:
    kinds = ("short", "words")
    rows = instruction_tasks.instruction_rows(kinds)
    assert rows == instruction_tasks.instruction_rows(kinds) and {row["kind"] for row in rows} == {"short", "words"}
    short = next(row for row in rows if row["kind"] == "short")
    answers = ["It is a thing.", "It is " + "very " * 9 + "long."]
    scores = InstructionReward(is_strict=True)(["", ""], answers, instructions=[short["instructions"]] * 2)
    assert [score.reward for score in scores] == [1.0, 0.0]


def test_one_choice_is_right_and_is_where_the_letter_says() -> None:
    rows = choice_tasks.choice_rows()
    assert len({row["question"] for row in rows}) == len(rows)
    answers = [f"{row['answer']}. {row['choices']['ABCD'.index(row['answer'])]}" for row in rows]
    columns = {name: [row[name] for row in rows] for name in ("answer", "choices")}
    assert {score.reward for score in MultipleChoiceReward()([""] * len(rows), answers, **columns)} == {1.0}
    assert all(len(set(row["choices"])) == 4 for row in rows)


# --- data by name ----------------------------------------------------------------------------------------------------


def packed(cases: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def livecodebench(**changes: Any) -> dict[str, Any]:
    return {
        "question_content": "Add.",
        "starter_code": "def add(a, b):",
        "public_test_cases": json.dumps([{"input": "1\n[2]", "output": "3", "testtype": "functional"}]),
        "private_test_cases": packed([{"input": "5\n[6]", "output": "11", "testtype": "functional"}]),
        "metadata": json.dumps({"func_name": "add"}),
        **changes,
    }


def split_tests(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The public tests and the private ones of one row, as the script makes them."""
    both = sdpo_code.as_prompts(Dataset.from_list([row]), private_share=0.5)
    return [json.loads(dataset[0]["tests"]) for dataset in both]


def test_rows_of_livecodebench_have_their_tests_split_as_they_come() -> None:
    public, private = split_tests(livecodebench())
    assert public == {"type": "functional", "fn_name": "add", "tests": [{"input": [1, [2]], "output": 3}]}
    assert private["tests"] == [{"input": [5, [6]], "output": 11}]
    plain = livecodebench(
        starter_code="", metadata="{}", private_test_cases=json.dumps([{"input": "1 2\n", "output": "3\n"}])
    )
    assert split_tests(plain)[1] == {"type": "stdin", "tests": [{"input": "1 2\n", "output": "3\n"}]}
    prompt = sdpo_code.as_prompts(Dataset.from_list([plain]), private_share=0.5)[0][0]["prompt"]
    assert prompt[0]["content"] == f"Add.\n\n{sdpo_code.STDIN} {sdpo_code.INSTRUCTION}"


def test_a_pickle_that_would_run_something_is_refused() -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, ("must_not_be_there",)

    bomb = base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()
    with pytest.raises(ValueError, match=r"asks for \w+.mkdir, where text is expected"):
        split_tests(livecodebench(private_test_cases=bomb))
    assert not Path("must_not_be_there").exists()


def test_hidden_tests_are_private_and_else_a_share_of_all() -> None:
    cases = [{"input": [i], "output": i} for i in range(4)]
    marked = [{**case, "hidden": i == 2} for i, case in enumerate(cases)]
    row = {"prompt": "w1", "tests": json.dumps({"type": "functional", "fn_name": "f", "tests": marked})}
    public, private = split_tests(row)
    assert [test["input"] for test in public["tests"]] == [[0], [1], [3]]
    assert private["tests"] == [{"input": [2], "output": 2, "hidden": False}]
    row["tests"] = json.dumps({"type": "functional", "fn_name": "f", "tests": cases})
    assert [len(tests["tests"]) for tests in split_tests(row)] == [2, 2]
    row["tests"] = json.dumps({"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"], "testtype": "stdin"})
    assert split_tests(row)[1] == {"type": "stdin", "tests": [{"input": i, "output": i} for i in ("2", "3")]}
    row["tests"] = json.dumps({"type": "stdin", "tests": [{"input": "1", "output": "1"}]})
    with pytest.raises(ValueError, match="one test only"):
        split_tests(row)


def test_rows_of_ifeval_become_rules() -> None:
    row = {
        "prompt": "w1",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None, "relation": None}, {"num_words": 3, "relation": "less than"}],
    }
    [read] = sdpo_instructions.as_prompts(Dataset.from_list([row]))
    assert read["prompt"] == [{"role": "user", "content": "w1"}]
    scores = InstructionReward()([""] * 2, ["w1 w2", "w1, w2 w3"], instructions=[read["instructions"]] * 2)
    assert [score.reward for score in scores] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "w1", "choices": {"text": ["w2", "w3"], "label": ["1", "2"]}, "answerKey": "2"}, "B"),
        ({"question": "w1", "choices": ["w2", "w3"], "answer": 1}, "B"),
        ({"question": "w1", "options": ["w2", "w3", "w4"], "answer": "C", "answer_index": 2}, "C"),
        ({"question": "w1", "choices": ["w2", "w3"], "answer": "w2"}, "A"),
    ],
)
def test_choices_of_several_forms_become_letters(row: dict[str, Any], answer: str) -> None:
    [read] = sdpo_mcq.as_prompts(Dataset.from_list([row]))
    assert read["answer"] == answer
    assert read["prompt"][0]["content"].startswith("w1\nA. w2\nB. w3")


def test_a_right_choice_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'w9' is none of the choices"):
        sdpo_mcq.letter_of("w9", ["w2", "w3"])


@pytest.mark.parametrize(
    "read", [sdpo_instructions.as_prompts, sdpo_mcq.as_prompts, lambda d: sdpo_code.as_prompts(d, private_share=0.5)]
)
def test_unknown_columns_are_named(read: Callable[[Dataset], Any]) -> None:
    with pytest.raises(ValueError, match=r"Expected.*found \['w1'\]"):
        read(Dataset.from_list([{"w1": 1}]))


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bare_command_line_is_the_demo(recipe: Any) -> None:
    script, config, model = recipe.parse([])
    assert (script.dataset_name, model.model_name_or_path, script.preset) == (None, None, None)
    assert config.output_dir.startswith("outputs/") and 0 < config.distillation_weight < 1
    data = recipe.load_data(script)
    assert len(data.train) >= 30 and all(len(questions) >= 20 for questions in data.tests.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_preset_gives_what_the_command_line_does_not(recipe: Any) -> None:
    words = """--model_name_or_path M --dataset_name D --preset rich_feedback --learning_rate 3e-6 --num_generations 4
        --per_device_train_batch_size 2"""
    script, config, model = recipe.parse(words.split())
    assert (script.dataset_name, model.model_name_or_path) == ("D", "M")
    assert (config.learning_rate, config.num_generations) == (3e-6, 4)
    # a block is 32 questions of 4 completions, and a step one question: two microbatches of two rows
    assert config.gradient_accumulation_steps == 2
    assert (config.generation_batch_size, config.distillation_topk, config.distillation_mode) == (
        128,
        20,
        "topk_logits",
    )


def test_a_preset_is_refused_where_it_cannot_act(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--preset cannot take effect in the demo"):
        sdpo_code.parse(["--preset", "test_time"])
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: M\ndataset_name: D\npreset: test_time\n")
    with pytest.raises(ValueError, match="say --preset test_time"):
        sdpo_code.parse(["--config", str(file)])


# --- runs ------------------------------------------------------------------------------------------------------------

FUNCTIONAL = {
    "type": "functional",
    "fn_name": "f",
    "tests": [{"input": [1], "output": 1}, {"input": [2], "output": 2}],
}
ROWS: dict[Any, dict[str, Any]] = {
    sdpo_code: {"prompt": "w1", "tests": json.dumps(FUNCTIONAL)},
    sdpo_instructions: {"prompt": "w1", "instructions": json.dumps([{"id": "punctuation:no_comma", "kwargs": {}}])},
    sdpo_mcq: {"question": "w1", "choices": ["w2", "w3"], "answer": "A"},
}


@pytest.mark.parametrize("recipe", list(ROWS))
def test_a_recipe_trains_on_a_data_set_and_says_what_was_gained(
    recipe: Any, tokenizer: Any, tmp_path: Path, capsys: Any
) -> None:
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = Dataset.from_list([ROWS[recipe]] * 6)
    DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "data")
    trainers: list[Any] = []
    line = f"""
        --model_name_or_path {tmp_path / "model"} --dataset_name {tmp_path / "data"} --output_dir {tmp_path / "out"}
        --include_environment_feedback true --max_steps 1 --per_device_train_batch_size 4 --num_generations 2
        --max_completion_length 4 --save_strategy no --num_test_questions 2 --num_test_samples 2 --use_cpu
        --gradient_checkpointing false --disable_tqdm true --check_teacher true --num_check_questions 2"""
    recipe.main(line.split(), on_trainer=trainers.append)
    assert trainers[0].state.global_step == 1
    printed = capsys.readouterr().out
    assert "teacher, as in the run" in printed and "gained" in printed and "after:" in printed
    accuracies = json.loads((tmp_path / "out" / "accuracy.json").read_text())
    assert accuracies["accuracy_after"]["num_questions"] == 2
    assert "trained with SDPO" in (tmp_path / "out" / "README.md").read_text()


def test_a_gain_has_the_error_of_the_differences() -> None:
    # 0.4 and 0.2: mean 0.3, standard error |0.4 - 0.2| / 2 = 0.1, however much the questions themselves differ
    found = common.gain([0.0, 0.7], [0.4, 0.9])
    assert (found.mean, found.standard_error) == (pytest.approx(0.3), pytest.approx(0.1))
