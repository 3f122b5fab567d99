"""Prints the token credit of a failed attempt: log teacher - log student of each of its tokens, in nats.

    python scripts/show_credit.py                        # the demo's model on the demo's task
    python scripts/show_credit.py --task chain --seed 2  # another task of examples/demo_tasks.py, other samples

Nothing is trained. Of the answers that failed, ended by themselves and have a context, the one with the lowest credit
of a token is shown: the question, the answer, what its teacher is shown besides the question, and the credit of its
tokens.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import sdpo_math
from demo_model import embedded_model
from demo_tasks import TASKS, build_task

from sdpo import SDPOTrainer
from sdpo.demonstrations import is_success
from sdpo.reprompt import build_teacher_contexts, fit_teacher_prompt
from sdpo.types import ScoredRollout, TeacherContext


@dataclass(frozen=True)
class Attempt:
    """An answer with its teacher's context and the prompt (Q) that the teacher reads."""

    scored: ScoredRollout
    context: TeacherContext
    teacher_prompt_ids: list[int]


def attempts(trainer: SDPOTrainer, *, num_questions: int) -> list[Attempt]:
    """Answers to the first questions of the training set, `num_generations` each."""
    rows = [row for row in list(trainer.train_dataset)[:num_questions] for _ in range(trainer.args.num_generations)]
    scored = trainer.scorer.score(trainer.roll_out(rows, "eval"), rows, trainer_state=trainer.state)
    found = []
    for row, context in zip(scored, build_teacher_contexts(scored, trainer.reprompt), strict=True):
        prompt, context, _ = fit_teacher_prompt(
            row.rollout.prompt,
            context,
            trainer.reprompt,
            count_tokens=lambda p: len(trainer.tokenizer.encode([p])[0]),
        )
        found.append(Attempt(row, context, trainer.tokenizer.encode([prompt])[0]))
    return found


@torch.no_grad()
def logps(model: nn.Module, prompt_ids: list[int], completion_ids: list[int]) -> torch.Tensor:
    """Log-prob (T,) of each token of the completion, in nats."""
    ids = torch.tensor([[*prompt_ids, *completion_ids]])
    logits = model.eval()(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion_ids).unsqueeze(-1)).squeeze(-1)


def credit(trainer: SDPOTrainer, attempt: Attempt) -> torch.Tensor:
    """log teacher - log student (T,) of the attempt's tokens; before training both are the same weights."""
    rollout = attempt.scored.rollout
    student = logps(trainer.model, rollout.prompt_ids, rollout.completion.ids)
    return logps(trainer.model, attempt.teacher_prompt_ids, rollout.completion.ids) - student


def transcript(trainer: SDPOTrainer, attempt: Attempt) -> str:
    """The attempt in six lines, a column a token."""
    rollout, tokenizer = attempt.scored.rollout, trainer.tokenizer.tokenizer
    tokens = [tokenizer.decode([token]).strip() or "' '" for token in rollout.completion.ids]
    values = [f"{value:+.1f}" for value in credit(trainer, attempt).tolist()]
    widths = [max(map(len, pair)) for pair in zip(tokens, values, strict=True)]
    columns = [
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in (tokens, values)
    ]
    lines = {
        "question": rollout.prompt[-1]["content"],
        "attempt": f"{rollout.text}   (reward {attempt.scored.reward:g})",
        "sibling": attempt.context.demonstration_text,
        "feedback": attempt.context.feedback,
        "tokens": columns[0],
        "credit": columns[1],
    }
    return "\n".join(f"{name:<10}{text}" for name, text in lines.items() if text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(TASKS), default="sum")
    parser.add_argument("--seed", type=int, default=1, help="of the samples")
    parser.add_argument("--num_questions", type=int, default=8, help="questions that are answered")
    parser.add_argument("--num_shown", type=int, default=1, help="failed attempts that are shown")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    settings = ["--seed", str(arguments.seed), "--include_environment_feedback", "true", "--disable_tqdm", "true"]
    _, config, _ = sdpo_math.parse([*settings, "--feedback_template", "\n{feedback_raw}"])
    task = build_task(arguments.task)
    trainer = SDPOTrainer(embedded_model(), task.reward, config, task.train)
    failed = [
        attempt
        for attempt in attempts(trainer, num_questions=arguments.num_questions)
        if attempt.context.is_informative
        and not is_success(attempt.scored, trainer.reprompt)
        and not attempt.scored.rollout.completion.is_truncated
    ]
    if not failed:
        sys.exit("No answer failed and has a context; take another seed or more questions.")
    failed.sort(key=lambda attempt: credit(trainer, attempt).min().item())
    print("\n\n".join(transcript(trainer, attempt) for attempt in failed[: arguments.num_shown]))


if __name__ == "__main__":
    main()
