"""Training dynamics: metrics of trajectories and batches, and warnings from these."""

from megarl.diagnostics.advantages import advantage_metrics
from megarl.diagnostics.alerts import Alerts
from megarl.diagnostics.experts import expert_metrics
from megarl.diagnostics.groups import group_metrics
from megarl.diagnostics.responses import response_metrics
from megarl.diagnostics.rewards import reward_metrics

__all__ = ["Alerts", "advantage_metrics", "expert_metrics", "group_metrics", "response_metrics", "reward_metrics"]
