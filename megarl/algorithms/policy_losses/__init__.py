"""Policy losses: a log-ratio of two policies (`ratios`) and a surrogate of it (`surrogates`), paired in `registry`."""

from megarl.algorithms.policy_losses.policy_loss import INPUTS, PolicyLoss, TokenLoss
from megarl.algorithms.policy_losses.ratios import probability_ratio
from megarl.algorithms.policy_losses.registry import POLICY_LOSSES

__all__ = ["INPUTS", "POLICY_LOSSES", "PolicyLoss", "TokenLoss", "probability_ratio"]
