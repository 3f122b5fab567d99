"""A run's log that no model made: word problems, wrong turns, feedback. For the report's tests, and to look at.

python tests/synthetic_run.py FOLDER [NUM_ATTEMPTS]
"""

from __future__ import annotations

import functools
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

from sdpo import completion_log
from sdpo.completion_log import CompletionRecord, TokenValues

GROUP, GROUPS_PER_STEP = 8, 16
NAMES = ["Janet", "Omar", "Wei", "Priya", "Lucas", "Noor", "Ayumi", "Tom"]
THINGS = ["eggs", "stamps", "marbles", "tickets", "pears", "coins", "books", "cards"]
SENTENCES = (
    "First we count what there is, then we take away what was given, and so the number that is left follows from it. "
    "Let us check each part again: nothing was bought in between, and nobody else took any of them."
)
OTHERS = [
    " the",
    " a",
    " so",
    " then",
    " we",
    " 1",
    " 2",
    " 3",
    ",",
    ".",
    " is",
    " left",
    "\n",
    " have",
    " not",
    " each",
]


@functools.cache
def _shares(share: float) -> tuple[int, list[float]]:
    """Five probabilities, largest first, of which `share` is one, and its place."""
    shares = sorted([share, *((1.0 - share) * 0.5**i for i in range(1, 5))], reverse=True)
    return shares.index(share), shares


def _top(rng: random.Random, token: str, share: float) -> tuple[list[str], list[float]]:
    """Five likeliest tokens of which `token` has the probability `share`, to two decimals."""
    place, shares = _shares(round(share, 2))
    start = rng.randrange(len(OTHERS) - 4)
    others = OTHERS[start : start + 4]
    return [*others[:place], token, *others[place:]], shares


def _values(rng: random.Random, tokens: list[str], wrong: int | None, right: str) -> TokenValues:
    """Students are sure of most tokens; the teacher differs at the wrong one, and a little elsewhere."""
    student, credit, entropy = [], [], []
    student_top, student_prob, teacher_top, teacher_prob = [], [], [], []
    for i, token in enumerate(tokens):
        share = rng.choice((0.99, 0.97, 0.95, 0.9, 0.7, 0.45, 0.2))
        gap = rng.gauss(0.0, 0.12) if rng.random() < 0.85 else rng.gauss(0.0, 0.9)
        if i == wrong:
            share, gap = 0.78, -rng.uniform(2.5, 5.0)
        theirs = min(0.995, share * math.exp(gap))
        student.append(math.log(share))
        credit.append(math.log(theirs / share))
        entropy.append(-share * math.log(share) + (1 - share) * 2)
        top, prob = _top(rng, token, share)
        student_top.append(top)
        student_prob.append(prob)
        top, prob = _top(rng, token, theirs)
        if i == wrong:
            top, prob = [right, token, *OTHERS[:3]], [0.97 - theirs, theirs, 0.01, 0.01, 0.005]
        teacher_top.append(top)
        teacher_prob.append(prob)
    divergence = [abs(c) * 0.6 for c in credit]
    return TokenValues(student, entropy, credit, divergence, student_top, student_prob, teacher_top, teacher_prob)


def _attempt(
    rng: random.Random, step: int, group: int, row: int, question: tuple[str, str, int, int]
) -> CompletionRecord:
    name, thing, have, gave = question
    is_success = rng.random() < 0.15 + 0.6 * (1 - math.exp(-step / 40))
    said = have - gave if is_success else have - gave + rng.choice((-10, -1, 1, 10))
    filler = SENTENCES.split()
    words = [f" {word}" for word in rng.sample(filler, rng.randint(20, len(filler)))]
    tail = [
        f" {have}",
        " -",
        f" {gave}",
        " =",
        f" {said}",
        ".",
        "\n",
        "The",
        " answer",
        " is",
        " \\boxed{",
        str(said),
        "}.",
    ]
    tokens = [name, " has", f" {have}", f" {thing}", ".", *words, *words[::-1], ".", " So", *tail, "<|im_end|>"]
    wrong = None if is_success else len(tokens) - len(tail) + 3
    prompt = (
        f"<|im_start|>user\n{name} has {have} {thing} and gives {gave} of them away. How many are left?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    feedback = None if is_success else f"The answer {said} is not right. {have} less {gave} is not {said}: check it."
    return CompletionRecord(
        block=step - 1,
        group=group,
        row=group * GROUP + row,
        prompt=prompt,
        completion="".join(tokens[:-1]),
        token_ids=list(range(len(tokens))),
        token_texts=tokens,
        reward=float(is_success),
        advantage=1.2 if is_success else -0.7,
        is_success=is_success,
        feedback=feedback,
        teacher_prompt=prompt,
        demonstration=None,
        demonstration_source=None,
        demonstration_text=None,
        shown_feedback=None,
        is_distilled=False,
        is_in_policy=False,
        is_prompt_truncated=False,
        is_context_shortened=False,
        is_completion_truncated=False,
        rewards={"exact": float(is_success), "format": 1.0},
        values=_values(rng, tokens, wrong, f" {have - gave}"),
    )


def _with_teacher(record: CompletionRecord, group: list[CompletionRecord]) -> CompletionRecord:
    """The record with what its teacher is shown: a sibling's success and the feedback. Without any, no values."""
    shown = next((other for other in group if other.is_success and other is not record), None)
    if shown is None and record.feedback is None:
        return replace(record, values=TokenValues())
    text = "" if shown is None else f"\nCorrect solution:\n\n{shown.completion}\n\n"
    told = "" if record.feedback is None else f"\nYour earlier attempt:\n\n{record.feedback}\n\n"
    question, end = record.prompt.split("<|im_end|>", 1)
    return replace(
        record,
        teacher_prompt=f"{question}{text}{told}\nCorrectly solve the original question.\n<|im_end|>{end}",
        demonstration=None if shown is None else shown.row,
        demonstration_source=None if shown is None else "sibling",
        demonstration_text=None if shown is None else shown.completion,
        shown_feedback=record.feedback,
        is_distilled=True,
    )


def make_run(folder: Path, *, num_attempts: int = 10_000, seed: int = 0) -> Path:
    """The folder with the log of a run of so many attempts, or a few more, so that steps are whole."""
    rng = random.Random(seed)
    where = folder / completion_log.FOLDER
    where.mkdir(parents=True)
    for step in range(1, math.ceil(num_attempts / (GROUP * GROUPS_PER_STEP)) + 1):
        records: list[CompletionRecord] = []
        for group in range(GROUPS_PER_STEP):
            have = rng.randint(20, 99)
            question = rng.choice(NAMES), rng.choice(THINGS), have, rng.randint(2, have - 2)
            attempts = [_attempt(rng, step, group, row, question) for row in range(GROUP)]
            records += [_with_teacher(record, attempts) for record in attempts]
        completion_log.write_completions(where, step, records)
        share = sum(record.is_success for record in records) / len(records)
        credits = sorted(c for record in records for c in record.values.credit or [])
        completion_log.append_metrics(
            where,
            {
                "step": step,
                "epoch": step / 100,
                "reward": share,
                "self_distillation/success_group_fraction": min(1.0, 2 * share),
                "self_distillation/reprompt_sample_fraction": sum(r.is_distilled for r in records) / len(records),
                "self_distillation/distillation_loss": 0.4 * math.exp(-step / 50) + rng.gauss(0, 0.01),
                "credit/mean": sum(credits) / len(credits),
                **{f"credit/q{round(100 * q):02d}": credits[int(q * len(credits))] for q in (0.05, 0.95)},
                "entropy": 1.2 * math.exp(-step / 200) + rng.gauss(0, 0.02),
                "completions/mean_length": sum(len(r.token_ids) for r in records) / len(records),
                "completions/min_length": min(len(r.token_ids) for r in records),
                "completions/max_length": max(len(r.token_ids) for r in records),
                "grad_norm": 1 + rng.gauss(0, 0.1),
                "learning_rate": 1e-5,
            },
        )
    return folder


if __name__ == "__main__":
    make_run(Path(sys.argv[1]), num_attempts=int(sys.argv[2]) if len(sys.argv) > 2 else 10_000)
