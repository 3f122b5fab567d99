"""Reward and feedback of verifiable instructions: which rules a response breaks, and by how much."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sdpo.rewards.attempts import CUT_OFF, answers_of, column, truncations
from sdpo.rewards.instruction_rules import RELATIONS, RULES, Rule
from sdpo.templates import did_you_mean
from sdpo.types import Score

_TYPES = {"str": str, "int": int, "Sequence[str]": Sequence}


@dataclass(frozen=True)
class InstructionReward:
    """Reward function: the share of its row's rules that a completion follows, and each rule that it breaks.

    The column `column` holds a list of `{"id": "length_constraints:number_words", "kwargs": {"num_words": 50,
    "relation": "at least"}}`, or its JSON text, with the ids of `RULES`; None: the function does not apply. Where it
    is absent, `instruction_id_list` and `kwargs` are read, as IFEval's data has them. `is_strict`: 1.0 where all rules
    are followed, else 0.0.
    """

    column: str = "instructions"
    is_strict: bool = False

    __name__ = "instruction_reward"

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Any = None,
        *,
        is_truncated: Sequence[bool] | None = None,
        **columns: Any,
    ) -> list[Score]:
        """One Score per completion, in order.

        Raises:
            ValueError: no column of rules, an unknown rule, or arguments that are not those of the rule; the message
                names the row.
            ImportError: a rule about the language, without the package for it.
        """
        count = len(completions)
        rows = [read_rules(rules, f"row {i}") for i, rules in enumerate(self._given(columns, count))]
        cut = truncations(is_truncated, count)
        return [self._score(*row) for row in zip(answers_of(completions), rows, cut, strict=True)]

    def _given(self, columns: Mapping[str, Any], count: int) -> Sequence[Any]:
        if self.column not in columns and {"instruction_id_list", "kwargs"} <= columns.keys():
            pairs = zip(columns["instruction_id_list"], columns["kwargs"], strict=True)
            return [[{"id": i, "kwargs": k} for i, k in zip(*pair, strict=True)] for pair in pairs]
        return column(columns, self.column, count, what="the rules of responses are")

    def _score(self, text: str, rules: Sequence[Rule] | None, is_cut: bool) -> Score:
        if rules is None:
            return Score(None)
        if not text:
            return Score(0.0, f"{CUT_OFF} before the response began." if is_cut else "The response is empty.")
        problems = [problem for problem in (rule(text) for rule in rules) if problem is not None]
        if not problems:
            return Score(1.0)
        reward = 0.0 if self.is_strict else 1 - len(problems) / len(rules)
        return Score(reward, "\n".join([*problems, *([f"{CUT_OFF}."] if is_cut else [])]))


instruction_reward = InstructionReward()
"""With every setting at its default."""


def read_rules(rules: Any, where: str) -> list[Rule] | None:
    """The rules of one row as functions of the response alone; None where the row has none.

    Raises:
        ValueError: they are not of the form that `InstructionReward` describes.
    """
    try:
        found = json.loads(rules) if isinstance(rules, str) else rules
    except ValueError as error:
        raise ValueError(f"instructions of {where}: no JSON ({error})") from error
    if found is None:
        return None
    is_list = isinstance(found, Sequence) and all(isinstance(rule, Mapping) and "id" in rule for rule in found)
    if not is_list or not found:
        raise ValueError(f"instructions of {where}: a list of dicts with 'id' and 'kwargs' is needed, got {rules!r}")
    return [_rule(rule["id"], rule.get("kwargs") or {}, f"instructions of {where}") for rule in found]


def _rule(name: str, kwargs: Mapping[str, Any], where: str) -> Rule:
    if name not in RULES:
        known = ", ".join(RULES)
        raise ValueError(f"{where}: there is no rule {name!r}.{did_you_mean(name, RULES)} The rules are {known}")
    # A column of dicts has every key of every row; those of other rules are None.
    given = {key: value for key, value in kwargs.items() if value is not None}
    needed = {p.name: p.annotation for p in inspect.signature(RULES[name]).parameters.values() if p.name != "text"}
    if given.keys() != needed.keys():
        raise ValueError(f"{where}: {name} takes {sorted(needed)}, got {sorted(given)}")
    for key, value in given.items():
        if isinstance(value, float) and value.is_integer():  # as a column with missing values has whole numbers
            given[key] = value = int(value)
        is_text_for_list = needed[key] == "Sequence[str]" and isinstance(value, str)
        if not isinstance(value, _TYPES[needed[key]]) or is_text_for_list:
            raise ValueError(f"{where}: {key} of {name} is {value!r}; a value of type {needed[key]} is needed")
        if key.endswith("relation") and value not in RELATIONS:
            raise ValueError(f"{where}: {key} of {name} is {value!r}; one of {list(RELATIONS)} is needed")
    return partial(RULES[name], **given)
