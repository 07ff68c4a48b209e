"""Scoring of responses: built-in verifiers and users' own functions."""

from megarl.rewards.registry import REWARDS, load_reward
from megarl.rewards.scorer import Batch, Outcome, Scorer
from megarl.rewards.scoring import (
    RewardFailed,
    RewardFunction,
    RewardLost,
    RewardResult,
    RewardSample,
    RewardTimedOut,
    Score,
)
from megarl.rewards.terms import OVERLONG

__all__ = [
    "OVERLONG",
    "REWARDS",
    "Batch",
    "Outcome",
    "RewardFailed",
    "RewardFunction",
    "RewardLost",
    "RewardResult",
    "RewardSample",
    "RewardTimedOut",
    "Score",
    "Scorer",
    "load_reward",
]
