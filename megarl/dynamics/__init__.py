"""Training dynamics: metrics of trajectories and batches, and warnings from these."""

from megarl.dynamics.advantages import advantage_metrics
from megarl.dynamics.experts import expert_metrics
from megarl.dynamics.groups import group_metrics
from megarl.dynamics.responses import response_metrics
from megarl.dynamics.watch import Watch

__all__ = ["Watch", "advantage_metrics", "expert_metrics", "group_metrics", "response_metrics"]
