"""Training dynamics: metrics of trajectories and batches, and warnings derived from them."""

from megarl.diagnostics.advantages import AdvantageStretches, advantage_metrics
from megarl.diagnostics.alerts import Alerts
from megarl.diagnostics.step import (
    expert_metrics,
    group_metrics,
    prefix_cache_metrics,
    replay_metrics,
    response_metrics,
    reward_metrics,
)

__all__ = [
    "AdvantageStretches",
    "Alerts",
    "advantage_metrics",
    "expert_metrics",
    "group_metrics",
    "prefix_cache_metrics",
    "replay_metrics",
    "response_metrics",
    "reward_metrics",
]
