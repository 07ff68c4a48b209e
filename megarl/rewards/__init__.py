"""Scoring of responses: built-in verifiers and users' own functions."""

from megarl.rewards.registry import REWARDS, load_reward
from megarl.rewards.scoring import RewardFailed, RewardFunction, RewardResult, RewardSample, Score, score_all

__all__ = [
    "REWARDS",
    "RewardFailed",
    "RewardFunction",
    "RewardResult",
    "RewardSample",
    "Score",
    "load_reward",
    "score_all",
]
