"""Trains a model to write programs by self-distillation: what the tests said about an attempt is shown to its teacher.

    python examples/sdpo_code.py                                   # the demo: a small embedded model, small functions
    python examples/sdpo_code.py --model_name_or_path Qwen/Qwen3-8B --dataset_name livecodebench/code_generation_lite \
        --dataset_train_split test --dataset_test_split test --preset rich_feedback --output_dir outputs/sdpo-code

Tests are split: attempts are judged in training by public ones, and the accuracy that is printed is that on private
ones. Read are data sets with the columns of LiveCodeBench (`question_content`, `starter_code`, `public_test_cases`,
`private_test_cases`, `metadata`), and those with a `prompt` and `tests`, where the tests that are marked as hidden are
the private ones, or a share of all (--private_share) where none is. Settings are fields of this script's arguments, of
`sdpo.SDPOConfig` and of `trl.ModelConfig`.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import common
from common import CommonArguments, Data
from datasets import Dataset
from trl import ModelConfig

from sdpo import SDPOConfig, SDPOTrainer
from sdpo.rewards import CodeReward, Limits

HELD_OUT = "accuracy on held-out functions"
TRAINED = "accuracy on private tests of trained functions"
INSTRUCTION = "Answer with one ```python code block."
STDIN = "The program reads standard input and writes to standard output."


@dataclass
class ScriptArguments(CommonArguments):
    """What this script adds to the other recipes' arguments."""

    private_share: float = field(
        default=0.5,
        metadata={"help": "Share of a question's tests that are private, where the data do not say which."},
    )
    test_seconds: float = field(default=5.0, metadata={"help": "Time limit of one test."})


# What a bare `python examples/sdpo_code.py` runs. The feedback is left out and the teacher has a small part, since a
# model of this size answers worse when it is shown what went wrong (see examples/README.md).
DEMO_DEFAULTS: dict[str, Any] = {
    "--output_dir": "outputs/code",
    "--num_test_questions": 24,
    "--num_test_samples": 4,
    "--reprompt_template": "{solution}{prompt}{feedback}",
    "--solution_template": "{successful_previous_attempt}\n\n",
    "--distillation_weight": 0.25,
    "--distillation_mode": "topk_logits",
    "--distillation_topk": 20,
    "--distillation_alpha": 0.5,
    "--max_completion_length": 48,
    "--num_generations": 8,
    "--per_device_train_batch_size": 32,
    "--per_device_eval_batch_size": 128,
    "--learning_rate": 3e-5,
    "--lr_scheduler_type": "constant_with_warmup",
    "--warmup_steps": 2,
    "--max_steps": 8,
    "--logging_steps": 1,
    "--save_strategy": "no",
    "--gradient_checkpointing": False,
}


# --- data by name ----------------------------------------------------------------------------------------------------


class _TextUnpickler(pickle.Unpickler):
    """Reads text and containers; a pickle that names a class or a function is refused, since it could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"private_test_cases holds a pickle that asks for {module}.{name}, where text is expected.")


def packed_tests(value: str) -> list[dict[str, Any]]:
    """Tests of LiveCodeBench, which are JSON, or JSON that was pickled, compressed and encoded."""
    if value.lstrip().startswith("["):
        return json.loads(value)
    return json.loads(_TextUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(value)))).load())


def livecodebench_tests(cases: list[dict[str, Any]], fn_name: str | None) -> dict[str, Any]:
    """The tests as `CodeReward` reads them; inputs of functions come as JSON, an argument a line."""
    if fn_name is None:
        return {"type": "stdin", "tests": [{"input": c["input"], "output": c["output"]} for c in cases]}
    given = [[json.loads(line) for line in c["input"].splitlines() if line.strip()] for c in cases]
    tests = [{"input": i, "output": json.loads(c["output"])} for i, c in zip(given, cases, strict=True)]
    return {"type": "functional", "fn_name": fn_name, "tests": tests}


def read_livecodebench(row: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Question, public tests and private tests of a row as LiveCodeBench has them."""
    fn_name = json.loads(row["metadata"] or "{}").get("func_name")
    ask = f"Start from this code:\n```python\n{row['starter_code']}\n```" if row["starter_code"] else STDIN
    question = f"{row['question_content']}\n\n{ask} {INSTRUCTION}"
    columns = ("public_test_cases", "private_test_cases")
    public, private = (livecodebench_tests(packed_tests(row[column]), fn_name) for column in columns)
    return question, public, private


def read_tests(row: Mapping[str, Any], *, private_share: float) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Prompt, public tests and private tests of a row with `prompt` and `tests`.

    Tests are as `CodeReward` reads them, or lists of `inputs` and `outputs` with an `fn_name` where they call a
    function. Without hidden ones among them the last ones are private, at least one, and one at least is public.

    Raises:
        ValueError: there is one test only, so that none could be private.
    """
    found = json.loads(row["tests"]) if isinstance(row["tests"], str) else dict(row["tests"])
    if "inputs" in found:
        fn_name = found.get("fn_name") or None
        pairs = zip(found["inputs"], found["outputs"], strict=True)
        tests = [{"input": given, "output": expected} for given, expected in pairs]
        found = {"type": "functional", "fn_name": fn_name} if fn_name else {"type": "stdin"}
    else:
        tests = found["tests"]
    public = [test for test in tests if not test.get("hidden")]
    private = [{**test, "hidden": False} for test in tests if test.get("hidden")]
    if not private:
        if len(tests) < 2:
            raise ValueError(f"A question has one test only, so none can be private: {str(row['prompt'])[:80]!r}.")
        num_private = min(len(tests) - 1, max(1, round(private_share * len(tests))))
        public, private = tests[:-num_private], tests[-num_private:]
    return row["prompt"], {**found, "tests": public}, {**found, "tests": private}


def as_prompts(dataset: Dataset, *, private_share: float) -> tuple[Dataset, Dataset]:
    """The rows with `prompt` and `tests`, once with the public tests and once with the private ones.

    Raises:
        ValueError: the columns are of no known kind.
    """
    columns = set(dataset.column_names)
    livecodebench = {"question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata"}
    if not (livecodebench <= columns or {"prompt", "tests"} <= columns):
        raise ValueError(
            f"Expected the columns 'prompt' and 'tests', or those of LiveCodeBench, {sorted(livecodebench)}; found "
            f"{sorted(columns)}."
        )
    rows: dict[str, list[Any]] = {"public": [], "private": []}
    for row in dataset:
        if livecodebench <= columns:
            question, *tests = read_livecodebench(row)
        else:
            question, *tests = read_tests(row, private_share=private_share)
        prompt = [{"role": "user", "content": question}] if isinstance(question, str) else question
        for which, of_row in zip(rows, tests, strict=True):
            rows[which].append({"prompt": prompt, "tests": json.dumps(of_row)})
    return Dataset.from_list(rows["public"]), Dataset.from_list(rows["private"])


def load_data(arguments: ScriptArguments) -> Data:
    """Questions with public tests to train on, the same and held-out ones with private tests, and the reward."""
    reward = CodeReward(limits=Limits(seconds=arguments.test_seconds))
    if arguments.dataset_name is None:
        from code_tasks import code_rows, split_functions

        train, held_out = split_functions(num_held_out=arguments.num_test_questions)
        tests = {
            HELD_OUT: Dataset.from_list(code_rows(held_out, "private")),
            TRAINED: Dataset.from_list(code_rows(train, "private")),
        }
        public = Dataset.from_list(code_rows(train, "public"))
        return Data(public, tests, reward, "the functions of examples/code_tasks.py")
    train, test = (
        common.load_split(arguments, s) for s in (arguments.dataset_train_split, arguments.dataset_test_split)
    )
    public, _ = as_prompts(train, private_share=arguments.private_share)
    _, private = as_prompts(common.head(test, arguments.num_test_questions), private_share=arguments.private_share)
    return Data(public, {"accuracy on private tests": private}, reward, arguments.dataset_name)


def parse(arguments: list[str]) -> tuple[ScriptArguments, SDPOConfig, ModelConfig]:
    """The three groups of settings, see `common.parse`."""
    return common.parse(ScriptArguments, arguments, demo=DEMO_DEFAULTS)


def main(arguments: list[str], *, on_trainer: Callable[[SDPOTrainer], None] | None = None) -> None:
    """The whole script. `on_trainer` is called with the trainer once it is built, for measurements."""
    script, config, model_arguments = parse(arguments)
    rates = common.run(script, config, model_arguments, load_data(script), on_trainer=on_trainer)
    common.print_gains(rates)


if __name__ == "__main__":
    main(sys.argv[1:])
