"""Scoring of responses: built-in verifiers and users' own functions."""

from megarl.rewards.registry import REWARDS, load_reward
from megarl.rewards.scorer import Outcome, PendingScores, Scorer
from megarl.rewards.scoring import (
    UNCHECKED,
    RewardFailed,
    RewardFunction,
    RewardLost,
    RewardResult,
    RewardTimedOut,
    Score,
    reward_arguments,
)
from megarl.rewards.terms import OVERLONG, REWARD_MODEL

__all__ = [
    "OVERLONG",
    "REWARDS",
    "REWARD_MODEL",
    "UNCHECKED",
    "Outcome",
    "PendingScores",
    "RewardFailed",
    "RewardFunction",
    "RewardLost",
    "RewardResult",
    "RewardTimedOut",
    "Score",
    "Scorer",
    "load_reward",
    "reward_arguments",
]
