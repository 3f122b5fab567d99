"""Small tasks with verifiers, on which a model of 135 million parameters has room to learn.

`build_task(name)` returns the questions, split into training and held-out ones, and their reward function. The rows have
the columns `prompt` (messages) and `answer`, and for sums `question` ("4 + 8"). A reward function returns for each
completion a `Score`: the reward, and what an environment could say about that attempt without giving the answer away.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from sdpo import Score

Row = dict[str, Any]
RewardFunction = Callable[..., list[Score]]


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


# --- arithmetic: the right equation, written in full ------------------------------------------------------------------


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
        prompt = chat(system, examples, f"What is {question}?")
        rows.append({"prompt": prompt, "question": question, "answer": str(eval(question))})
    return rows


def sum_questions() -> list[Row]:
    """a + b of one digit: 100 questions."""
    numbers = [(a, b) for a in range(10) for b in range(10)]
    return arithmetic_rows(numbers, "+", "Answer with the full equation, for example: 2 + 3 = 5", [])


def longer_sum_questions() -> list[Row]:
    """A number of two digits plus one of one digit: 810 questions."""
    numbers = [(a, b) for a in range(10, 100) for b in range(1, 10)]
    return arithmetic_rows(numbers, "+", "Answer with the full equation, for example: 12 + 3 = 15", [])


def product_questions() -> list[Row]:
    """a * b from 2 to 12: 121 questions."""
    numbers = [(a, b) for a in range(2, 13) for b in range(2, 13)]
    return arithmetic_rows(numbers, "*", "Answer with the full equation, for example: 2 * 3 = 6", [])


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


def equation_reward(completions, question, answer, **_) -> list[Score]:
    """1 where the answer is the right equation and nothing else (a full stop may follow), else 0."""
    return [grade_equation(text_of(c), q, a) for c, q, a in zip(completions, question, answer, strict=True)]


def grade_equation(text: str, question: str, answer: str) -> Score:
    """Score of one answer to "What is `question`?"."""
    written = re.fullmatch(re.escape(question) + r" = (-?\d+)\.?", " ".join(text.split()))
    if written is None:
        return Score(0.0, f"Write one equation and nothing else. It starts with: {question} =")
    if written[1] != answer:
        return Score(0.0, f"{question} is not {written[1]}.")
    return Score(1.0)


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


# --- text ------------------------------------------------------------------------------------------------------------

TOPICS = (
    "rain snow fire ice wind gravity magnetism light sound heat paper glass steel bread cheese coffee tea sugar salt honey "
    "rivers mountains deserts volcanoes earthquakes oceans islands forests clouds rainbows trees flowers bees ants "
    "spiders birds whales sharks dogs cats horses elephants tigers bears computers robots telephones cameras clocks "
    "bicycles trains ships airplanes rockets bridges museums libraries schools hospitals music painting poetry chess "
    "football money democracy history mathematics chemistry biology medicine vaccines bacteria bones blood sleep dreams"
).split()

CAPITALS = {
    "Austria": "Vienna", "Belgium": "Brussels", "Bulgaria": "Sofia", "Croatia": "Zagreb", "Cuba": "Havana",
    "Czechia": "Prague", "Denmark": "Copenhagen", "Egypt": "Cairo", "Estonia": "Tallinn", "Finland": "Helsinki",
    "France": "Paris", "Germany": "Berlin", "Greece": "Athens", "Hungary": "Budapest", "Iceland": "Reykjavik",
    "India": "New Delhi", "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin", "Israel": "Jerusalem",
    "Italy": "Rome", "Japan": "Tokyo", "Jordan": "Amman", "Kenya": "Nairobi", "Latvia": "Riga", "Lebanon": "Beirut",
    "Lithuania": "Vilnius", "Mongolia": "Ulaanbaatar", "Morocco": "Rabat", "Nepal": "Kathmandu",
    "Netherlands": "Amsterdam", "Norway": "Oslo", "Peru": "Lima", "Philippines": "Manila", "Poland": "Warsaw",
    "Portugal": "Lisbon", "Romania": "Bucharest", "Russia": "Moscow", "Serbia": "Belgrade", "Slovakia": "Bratislava",
    "Spain": "Madrid", "Sweden": "Stockholm", "Syria": "Damascus", "Thailand": "Bangkok", "Tunisia": "Tunis",
    "Turkey": "Ankara", "Ukraine": "Kyiv", "Uruguay": "Montevideo", "Venezuela": "Caracas", "Vietnam": "Hanoi",
}  # fmt: skip


def word_limit_questions() -> list[Row]:
    """Explanations in at most ten words: 81 topics."""
    return [
        {"prompt": chat(None, [], f"What do you know about {topic}? Answer in at most ten words."), "answer": topic}
        for topic in TOPICS
    ]


def word_limit_reward(completions, answer, **_) -> list[Score]:
    """1 for a sentence of three to ten words that names the topic, else 0. Whether it is true is not checked."""
    return [grade_word_limit(text_of(c), topic) for c, topic in zip(completions, answer, strict=True)]


def grade_word_limit(text: str, topic: str) -> Score:
    """Score of one sentence about the topic."""
    words = text.split()
    if len(words) > 10:
        return Score(0.0, f"The answer has {len(words)} words. Write one short sentence of at most ten words.")
    if len(words) < 3 or not text.strip().endswith((".", "!")) or len(set(words)) < len(words) - 1:
        return Score(0.0, "Write one whole sentence.")
    if topic.lower().rstrip("s") not in text.lower():
        return Score(0.0, f"The sentence does not name {topic}.")
    return Score(1.0)


def capital_questions() -> list[Row]:
    """Capitals: 50 countries."""
    return [
        {"prompt": chat(None, [], f"What is the capital of {country}? Answer with its name only."), "answer": capital}
        for country, capital in CAPITALS.items()
    ]


def capital_reward(completions, answer, **_) -> list[Score]:
    """1 where the answer has the capital's name and at most three words, else 0."""
    return [grade_capital(text_of(c), capital) for c, capital in zip(completions, answer, strict=True)]


def grade_capital(text: str, capital: str) -> Score:
    """Score of one answer."""
    if len(text.split()) > 3:
        return Score(0.0, "Answer with the name of the city only.")
    return Score(1.0) if capital.lower() in text.lower() else Score(0.0, f"The capital is not {text.strip(' .')}.")


TASKS: dict[str, tuple[Callable[[], list[Row]], RewardFunction]] = {
    "sum": (sum_questions, equation_reward),
    "longer_sum": (longer_sum_questions, equation_reward),
    "product": (product_questions, equation_reward),
    "difference": (difference_questions, equation_reward),
    "chain": (chain_questions, steps_reward),
    "word_limit": (word_limit_questions, word_limit_reward),
    "capital": (capital_questions, capital_reward),
}
