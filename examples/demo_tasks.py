"""Small tasks with verifiers, on which a model of 135 million parameters has room to learn.

`build_task(name)` returns the questions, split into training and held-out ones, and their reward function. The rows
have the columns `prompt` (messages), `question` ("14 - 6") and `answer`. The reward of `chain` returns a `Score` for
each completion: the reward, and what an environment could say about that attempt without giving the answer away.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from datasets import Dataset

from sdpo import Score

Row = dict[str, Any]
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
RewardFunction = Callable[..., list[Any]]


@dataclass(frozen=True)
class Task:
    """Questions the model is trained on, questions it never sees in training, and the grader of both."""

    train: Dataset
    held_out: Dataset
    reward: RewardFunction


def build_task(name: str, *, num_held_out: int = 30, num_train: int | None = None, seed: int = 0) -> Task:
    """The task of that name. Which questions are held out depends on the seed alone; no question is in both sets.

    Raises:
        ValueError: there is no such task, or it has too few questions.
    """
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r}; the tasks are {sorted(TASKS)}.")
    questions, reward = TASKS[name]
    rows = questions()
    random.Random(seed).shuffle(rows)
    num_train = len(rows) - num_held_out if num_train is None else num_train
    if min(num_held_out, num_train) < 1 or num_held_out + num_train > len(rows):
        raise ValueError(f"{name} has {len(rows)} questions: not enough for {num_train} and {num_held_out} held out.")
    held_out, train = rows[:num_held_out], rows[num_held_out : num_held_out + num_train]
    return Task(Dataset.from_list(train), Dataset.from_list(held_out), reward)


# --- arithmetic: the right equation, written in full -------------------------------------------


def chat(system: str | None, examples: list[tuple[str, str]], question: str) -> list[dict[str, str]]:
    """A prompt of messages: a system turn where there is one, earlier turns as examples, and the question."""
    messages = [{"role": "system", "content": system}] if system else []
    for asked, answered in examples:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": question}]


def arithmetic_rows(
    numbers: list[tuple[int, ...]], sign: str, system: str | None, examples: list[tuple[str, str]]
) -> list[Row]:
    """One row for each tuple of numbers, which are joined by the sign."""
    rows = []
    for operands in numbers:
        question = f" {sign} ".join(map(str, operands))
        answer = str(reduce(OPERATIONS[sign], operands))
        prompt = chat(system, examples, f"What is {question}?")
        rows.append({"prompt": prompt, "question": question, "answer": answer})
    return rows


def sum_questions() -> list[Row]:
    """a + b of one digit, after one example: 99 questions."""
    numbers = [(a, b) for a in range(10) for b in range(10) if (a, b) != (2, 3)]
    return arithmetic_rows(numbers, "+", "Add.", [("What is 2 + 3?", "2 + 3 = 5")])


def written_sum_questions() -> list[Row]:
    """a + b of one digit, asked for by a system turn without an example of an answer: 99 questions."""
    numbers = [(a, b) for a in range(10) for b in range(10) if (a, b) != (2, 3)]
    return arithmetic_rows(numbers, "+", "Answer with the full equation, for example: 2 + 3 = 5", [])


def product_questions() -> list[Row]:
    """a * b from 2 to 12, after one example: 120 questions."""
    numbers = [(a, b) for a in range(2, 13) for b in range(2, 13) if (a, b) != (2, 3)]
    return arithmetic_rows(numbers, "*", "Multiply.", [("What is 2 * 3?", "2 * 3 = 6")])


def difference_questions() -> list[Row]:
    """a - b with a of at most 18 and b of one digit, after two examples: 154 questions."""
    numbers = [(a, b) for a in range(19) for b in range(1, 10) if a >= b]
    examples = [("What is 14 - 6?", "14 - 6 = 8"), ("What is 9 - 2?", "9 - 2 = 7")]
    return arithmetic_rows([n for n in numbers if n not in {(14, 6), (9, 2)}], "-", None, examples)


def chain_questions() -> list[Row]:
    """a + b + c of one digit in two steps, after two examples: 727 questions."""
    numbers = [(a, b, c) for a in range(1, 10) for b in range(1, 10) for c in range(1, 10)]
    examples = [
        ("What is 3 + 9 + 5?", "3 + 9 = 12, 12 + 5 = 17"),
        ("What is 6 + 1 + 8?", "6 + 1 = 7, 7 + 8 = 15"),
    ]
    return arithmetic_rows([n for n in numbers if n not in {(3, 9, 5), (6, 1, 8)}], "+", None, examples)


def text_of(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion, which is a list of messages where the prompt was one."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def equation_reward(completions, question, answer, **_) -> list[float]:
    """1 where the answer is the right equation and nothing else (a full stop may follow), else 0."""
    return [grade_equation(text_of(c), q, a) for c, q, a in zip(completions, question, answer, strict=True)]


def grade_equation(text: str, question: str, answer: str) -> float:
    """Reward of one answer to "What is `question`?"."""
    written = re.fullmatch(re.escape(question) + r" = (-?\d+)\.?", " ".join(text.split()))
    return float(written is not None and written[1] == answer)


def written_equation_reward(completions, question, answer, **_) -> list[Score]:
    """1 where the equation is in the answer, and no other result for the question, else 0."""
    return [grade_written_equation(text_of(c), q, a) for c, q, a in zip(completions, question, answer, strict=True)]


def grade_written_equation(text: str, question: str, answer: str) -> Score:
    """Score of one answer that has to hold the equation `question` = `answer`."""
    results = re.findall(re.escape(question) + r" = (-?\d+)", " ".join(text.split()))
    if set(results) == {answer}:
        return Score(1.0)
    # What to do, not what was wrong: a small model that reads about a mistake writes about it.
    return Score(0.0, f'Answer with "{question} = " and a number, nothing else.')


def steps_reward(completions, question, answer, **_) -> list[Score]:
    """1 where every equation in the answer is true and the last number is the right one, else 0."""
    return [grade_steps(text_of(c), q, a) for c, q, a in zip(completions, question, answer, strict=True)]


def grade_steps(text: str, question: str, answer: str) -> Score:
    """Score of one answer in steps."""
    equations = re.findall(r"(\d+) \+ (\d+) = (\d+)", text)
    wrong = [f"{a} + {b} is not {c}." for a, b, c in equations if int(a) + int(b) != int(c)]
    if wrong or not equations:
        return Score(0.0, wrong[0] if wrong else "Write the sum in two steps.")
    if re.findall(r"\d+", text)[-1] != answer:
        return Score(0.0, f"The steps do not add up all numbers of {question}.")
    return Score(1.0)


TASKS: dict[str, tuple[Callable[[], list[Row]], RewardFunction]] = {
    "sum": (sum_questions, equation_reward),
    "written_sum": (written_sum_questions, written_equation_reward),
    "product": (product_questions, equation_reward),
    "difference": (difference_questions, equation_reward),
    "chain": (chain_questions, steps_reward),
}
