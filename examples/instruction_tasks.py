"""Short questions, each with one instruction whose observance can be checked, for a model of 135 million parameters.

`instruction_rows()` gives rows with the columns `prompt`, `question`, `kind` and `instructions`, the rules as
`sdpo.rewards.InstructionReward` reads them. A rule sees words and lengths, not sense: an answer that follows it may
still be nonsense, so look at some before believing a figure.
"""

from __future__ import annotations

import json
import random
from typing import Any

THINGS = (
    "a volcano", "the moon", "a library", "honey", "a bicycle", "rain", "a doctor", "music", "a bridge", "salt",
    "a river", "winter", "a computer", "bread", "a garden", "the sun", "a teacher", "snow", "a forest", "milk",
    "a clock", "the ocean", "a farmer", "gold", "a train", "sleep", "a castle", "wind", "a hospital", "sugar",
    "a desert", "a camera", "a school", "paper", "a lion", "thunder", "a museum", "coffee", "a mirror", "a ship",
    "a candle", "silk", "a village", "a planet", "a telephone", "rice", "a whale", "fire", "a painter", "glass",
)  # fmt: skip
WORDS = (
    "window", "morning", "silver", "friend", "paper", "orange", "stone", "market", "gentle", "winter", "circle",
    "answer", "garden", "yellow", "island", "bottle", "travel", "number", "simple", "mirror",
)  # fmt: skip
MOST_WORDS = 10


def instruction_rows(kinds: tuple[str, ...] = ("short",), *, seed: int = 0) -> list[dict[str, Any]]:
    """One row for every thing and kind of instruction, in an order that depends on the seed alone.

    "short": at most ten words. "words": two given words have to occur, in at most 30 words.
    """
    chosen = random.Random(seed)
    rows = []
    for thing in THINGS:
        for kind in kinds:
            question, rules = INSTRUCTIONS[kind](thing, chosen)
            prompt = [{"role": "user", "content": question}]
            rows.append({"prompt": prompt, "question": question, "kind": kind, "instructions": json.dumps(rules)})
    chosen.shuffle(rows)
    return rows


def rule(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"id": name, "kwargs": kwargs}


def short(thing: str, _: random.Random) -> tuple[str, list[dict[str, Any]]]:
    number = rule("length_constraints:number_words", num_words=MOST_WORDS + 1, relation="less than")
    return f"What is {thing}? Answer in at most ten words.", [number]


def words(thing: str, chosen: random.Random) -> tuple[str, list[dict[str, Any]]]:
    pair = chosen.sample(WORDS, 2)
    question = f'Write one sentence about {thing} with the words "{pair[0]}" and "{pair[1]}".'
    number = rule("length_constraints:number_words", num_words=31, relation="less than")
    return question, [rule("keywords:existence", keywords=pair), number]


INSTRUCTIONS = {"short": short, "words": words}
