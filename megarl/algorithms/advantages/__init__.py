"""Advantages: how much better a response, or a token of it, is than expected."""

from megarl.algorithms.advantages.estimator import Estimator
from megarl.algorithms.advantages.process_rewards import distillation
from megarl.algorithms.advantages.registry import ADVANTAGES, estimate
from megarl.algorithms.advantages.scored import Advantages, ScoredResponses

__all__ = ["ADVANTAGES", "Advantages", "Estimator", "ScoredResponses", "distillation", "estimate"]
