"""Rewards and feedback: the caller of reward functions, and verifiers that can be used as one."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdpo.rewards.code import CodeReward as CodeReward
    from sdpo.rewards.code import code_reward as code_reward
    from sdpo.rewards.instructions import InstructionReward as InstructionReward
    from sdpo.rewards.instructions import instruction_reward as instruction_reward
    from sdpo.rewards.judge import JudgeReward as JudgeReward
    from sdpo.rewards.math import MathReward as MathReward
    from sdpo.rewards.math import math_reward as math_reward
    from sdpo.rewards.multiple_choice import MultipleChoiceReward as MultipleChoiceReward
    from sdpo.rewards.multiple_choice import multiple_choice_reward as multiple_choice_reward
    from sdpo.rewards.reasoning_gym import ReasoningGymReward as ReasoningGymReward
    from sdpo.rewards.reasoning_gym import reasoning_gym_dataset as reasoning_gym_dataset
    from sdpo.rewards.reasoning_gym import reasoning_gym_reward as reasoning_gym_reward
    from sdpo.rewards.sandbox import Limits as Limits
    from sdpo.rewards.sandbox import isolation_level as isolation_level
    from sdpo.rewards.scorer import FEEDBACK_COLUMN as FEEDBACK_COLUMN
    from sdpo.rewards.scorer import MAX_REWARD as MAX_REWARD
    from sdpo.rewards.scorer import RewardScorer as RewardScorer

# Resolved on first use: processes that judge answers start from this package and need neither torch nor transformers.
_NAMES = {
    "code": ("CodeReward", "code_reward"),
    "instructions": ("InstructionReward", "instruction_reward"),
    "judge": ("JudgeReward",),
    "math": ("MathReward", "math_reward"),
    "multiple_choice": ("MultipleChoiceReward", "multiple_choice_reward"),
    "reasoning_gym": ("ReasoningGymReward", "reasoning_gym_dataset", "reasoning_gym_reward"),
    "sandbox": ("Limits", "isolation_level"),
    "scorer": ("FEEDBACK_COLUMN", "MAX_REWARD", "RewardScorer"),
}
_HOME = {name: f"sdpo.rewards.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "FEEDBACK_COLUMN",
    "MAX_REWARD",
    "CodeReward",
    "InstructionReward",
    "JudgeReward",
    "Limits",
    "MathReward",
    "MultipleChoiceReward",
    "ReasoningGymReward",
    "RewardScorer",
    "code_reward",
    "instruction_reward",
    "isolation_level",
    "math_reward",
    "multiple_choice_reward",
    "reasoning_gym_dataset",
    "reasoning_gym_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sdpo.rewards' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
