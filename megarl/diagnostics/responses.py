"""The responses of a step before they are scored."""

import math
from collections.abc import Sequence

import numpy as np

from megarl.data import Trajectory
from megarl.tracking import Histogram, MetricValue

_BINS = 32
_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


def response_metrics(trajectories: Sequence[Trajectory], version: int, max_tokens: int) -> dict[str, MetricValue]:
    """Lengths in tokens, the share truncated at `max_tokens`, and the age of the oldest token of each response.

    `version` is that of the newest weights. There is at least one trajectory.
    """
    lengths = np.array([trajectory.sampled_tokens for trajectory in trajectories])
    ages = np.array([version - min(trajectory.versions, default=version) for trajectory in trajectories])
    quantiles = np.quantile(lengths, list(_QUANTILES.values()))
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        **{f"response_length/{name}": float(q) for name, q in zip(_QUANTILES, quantiles, strict=True)},
        "response_length/truncated_fraction": float(np.mean([each.is_truncated for each in trajectories])),
        "response_length/histogram": Histogram.of(lengths, length_edges(max_tokens)),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
    }


def length_edges(max_tokens: int) -> list[float]:
    """Edges of equal bins for the lengths 0 to `max_tokens`: the same at every step, and between two whole numbers."""
    width = math.ceil((max_tokens + 1) / _BINS)
    bins = math.ceil((max_tokens + 1) / width)
    return [place * width - 0.5 for place in range(bins + 1)]
