"""Questions with four choices about simple facts, for a model of 135 million parameters.

`choice_rows()` gives rows with the columns `prompt`, `question`, `choices` and `answer` (the letter of the right one).
The wrong choices are right answers to other questions of the same kind, drawn anew by the seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from demo_tasks import chat

LETTERS = "ABCD"
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "China": "Beijing",
    "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "Austria": "Vienna", "Poland": "Warsaw",
    "Sweden": "Stockholm", "Norway": "Oslo", "Portugal": "Lisbon", "Ireland": "Dublin", "Hungary": "Budapest",
    "Canada": "Ottawa", "Cuba": "Havana", "Peru": "Lima", "Kenya": "Nairobi", "Thailand": "Bangkok", "Iraq": "Baghdad",
    "Denmark": "Copenhagen", "Finland": "Helsinki", "Belgium": "Brussels", "Argentina": "Buenos Aires",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "happy": "sad", "dark": "light", "old": "young", "rich": "poor",
    "strong": "weak", "hard": "soft", "early": "late", "open": "closed", "full": "empty", "wet": "dry", "near": "far",
    "high": "low", "loud": "quiet", "clean": "dirty", "easy": "difficult", "long": "short", "wide": "narrow",
    "first": "last", "thick": "thin", "true": "false", "sharp": "blunt",
}  # fmt: skip
HOMES = {
    "a bee": "in a hive", "a bird": "in a nest", "a fish": "in the water", "a camel": "in the desert",
    "a penguin": "on the ice", "a monkey": "in the trees", "a cow": "on a farm", "a lion": "on the savanna",
    "a spider": "in a web", "a mole": "under the ground", "a bat": "in a cave", "a dog": "in a kennel",
}  # fmt: skip
JOBS = {
    "bakes bread": "a baker", "flies planes": "a pilot", "teaches children": "a teacher",
    "heals sick people": "a doctor",
    "puts out fires": "a firefighter", "grows crops": "a farmer", "cuts hair": "a barber", "fixes cars": "a mechanic",
    "writes books": "an author", "paints pictures": "an artist", "catches fish": "a fisherman",
    "acts in films": "an actor", "repairs teeth": "a dentist", "builds houses": "a builder",
    "plays music": "a musician", "sews clothes": "a tailor",
}  # fmt: skip
KINDS = {
    "What is the capital of {}?": CAPITALS,
    "What is the opposite of {}?": OPPOSITES,
    "Where does {} live?": HOMES,
    "Who {}?": JOBS,
}


def asked(question: str, choices: Sequence[str]) -> str:
    """The question with its choices, a line each."""
    return "\n".join([question, *(f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=True))])


EXAMPLES = [
    (asked("What is the opposite of up?", ["near", "down", "sad", "cold"]), "B. down"),
    (asked("What is the capital of Chile?", ["Cairo", "Rome", "Oslo", "Santiago"]), "D. Santiago"),
]


def choice_rows(*, seed: int = 0) -> list[dict[str, Any]]:
    """One row a question, in an order and with choices that depend on the seed alone."""
    chosen = random.Random(seed)
    rows = []
    for template, facts in KINDS.items():
        for subject, right in facts.items():
            wrong = chosen.sample([text for text in facts.values() if text != right], len(LETTERS) - 1)
            choices = [right, *wrong]
            chosen.shuffle(choices)
            question = asked(template.format(subject), choices)
            rows.append(
                {
                    "prompt": chat(None, EXAMPLES, question),
                    "question": question,
                    "choices": choices,
                    "answer": LETTERS[choices.index(right)],
                }
            )
    chosen.shuffle(rows)
    return rows
