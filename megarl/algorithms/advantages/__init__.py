"""Advantages: how much better a response, or one of its tokens, is than expected."""

from megarl.algorithms.advantages.estimator import INPUTS, Estimator, Rewards, Source
from megarl.algorithms.advantages.process_rewards import distillation
from megarl.algorithms.advantages.registry import ADVANTAGES, estimate, estimate_compact

__all__ = [
    "ADVANTAGES",
    "INPUTS",
    "Estimator",
    "Rewards",
    "Source",
    "distillation",
    "estimate",
    "estimate_compact",
]
