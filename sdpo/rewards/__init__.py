"""Rewards and feedback: the caller of reward functions, and verifiers that can be used as one."""

from sdpo.rewards.code import CodeReward, code_reward
from sdpo.rewards.sandbox import Limits, isolation_level
from sdpo.rewards.scorer import FEEDBACK_COLUMN, MAX_REWARD, RewardScorer

__all__ = [
    "FEEDBACK_COLUMN",
    "MAX_REWARD",
    "CodeReward",
    "Limits",
    "RewardScorer",
    "code_reward",
    "isolation_level",
]
