"""Rewards and feedback: the caller of reward functions, and verifiers that can be used as one."""

from sdpo.rewards.scorer import FEEDBACK_COLUMN, MAX_REWARD, RewardScorer

__all__ = ["FEEDBACK_COLUMN", "MAX_REWARD", "RewardScorer"]
