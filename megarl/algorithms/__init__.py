"""Algorithms as composable parts: advantages, policy losses, KL, aggregations, corrections. All are pure functions.

An objective combines the chosen parts into one loss. Each kind of part has a registry, keyed by the names of recipes.
"""

from megarl.algorithms.adaptive_kl import AdaptiveKl
from megarl.algorithms.advantages import ADVANTAGES, Rewards, Source
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.corrections import CORRECTIONS
from megarl.algorithms.implicit_reward import ImplicitRewardObjective, implicit_process_rewards
from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.metrics import AnyObjective, Metrics
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.policy_objective import PolicyObjective
from megarl.algorithms.preference import PreferenceObjective, RewardModelObjective
from megarl.algorithms.supervised import SftObjective, exact_matches
from megarl.algorithms.value_loss import ValueObjective

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "AdaptiveKl",
    "AnyObjective",
    "ImplicitRewardObjective",
    "Metrics",
    "PolicyObjective",
    "PreferenceObjective",
    "RewardModelObjective",
    "Rewards",
    "SftObjective",
    "Source",
    "ValueObjective",
    "exact_matches",
    "implicit_process_rewards",
]
