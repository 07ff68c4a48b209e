"""Probability ratios of the present policy to the old one, as counts that pieces of a batch can add up."""

import math

import torch
from torch import Tensor

from megarl.tracking import Histogram

_LOG_RATIOS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
RATIO_EDGES = tuple(math.exp(x) for x in (*(-x for x in reversed(_LOG_RATIOS)), *_LOG_RATIOS))
"""Alike below and above 1, and finer towards it: most ratios of a healthy step lie within a hundredth of 1."""


def ratio_counts(log_ratios: Tensor) -> Tensor:
    """How many of the ratios exp(`log_ratios` [T]) lie in each bin of RATIO_EDGES: float64[bins], no gradient.

    Ratios beyond the outer edges are in the outer bins. The counts of a batch are the sum of those of its pieces.
    """
    inner = torch.tensor(RATIO_EDGES[1:-1], dtype=torch.float64, device=log_ratios.device).log()
    places = torch.bucketize(log_ratios.detach().double(), inner, right=True)
    return torch.bincount(places, minlength=len(RATIO_EDGES) - 1).double()


def ratio_histogram(counts: Tensor) -> Histogram:
    """The metric that `counts` of `ratio_counts` are."""
    return Histogram(RATIO_EDGES, tuple(int(count) for count in counts.tolist()))
