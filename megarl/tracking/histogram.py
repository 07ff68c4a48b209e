"""A metric that is a distribution: counts of values per bin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Histogram:
    """`counts[i]` values are in [edges[i], edges[i + 1]); the last bin includes its upper edge.

    Raises ValueError unless the edges are finite and increasing, and one more than the counts.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1 or not self.counts:
            raise ValueError(f"{len(self.counts)} bins of a histogram have {len(self.counts) + 1} edges, not these")
        if not np.isfinite(self.edges).all() or any(low >= high for low, high in pairwise(self.edges)):
            raise ValueError(f"the edges of a histogram rise and are finite, unlike {self.edges}")

    @classmethod
    def of_numbered(cls, counts: Sequence[int]) -> "Histogram":
        """The histogram of things numbered from 0, with one bin around each number."""
        return cls(tuple(number - 0.5 for number in range(len(counts) + 1)), tuple(counts))

    @classmethod
    def of(cls, values: ArrayLike, edges: Sequence[float]) -> "Histogram":
        """The histogram of `values`; values outside the outer edges are counted in the outer bins."""
        clipped = np.clip(np.asarray(values, dtype=float), edges[0], edges[-1])
        counts, _ = np.histogram(clipped, np.asarray(edges, dtype=float))
        return cls(tuple(float(edge) for edge in edges), tuple(int(count) for count in counts))

    @property
    def is_numbered(self) -> bool:
        """Whether its bins are as in `of_numbered`."""
        return all(edge == number - 0.5 for number, edge in enumerate(self.edges))

    @property
    def total(self) -> int:
        """The number of values."""
        return sum(self.counts)

    @property
    def middles(self) -> tuple[float, ...]:
        """The middle of each bin."""
        return tuple((low + high) / 2 for low, high in pairwise(self.edges))

    def with_at_most(self, bins: int) -> "Histogram":
        """The same values in at most `bins` bins, by joining equally many neighbours; the last bin has the rest."""
        each = -(-len(self.counts) // bins)
        starts = range(0, len(self.counts), each)
        counts = tuple(sum(self.counts[start : start + each]) for start in starts)
        return Histogram((*(self.edges[start] for start in starts), self.edges[-1]), counts)

    def quantile(self, share: float) -> float:
        """The value below which `share` of the values lie, assuming values are spread evenly over their bin.

        NaN for an empty histogram.
        """
        if not self.total:
            return float("nan")
        reached = np.cumsum([0, *self.counts]) / self.total
        place = int(np.searchsorted(reached[1:], share))
        within = (share - reached[place]) / (reached[place + 1] - reached[place]) if self.counts[place] else 0.0
        low, high = self.edges[place], self.edges[place + 1]
        return float(low + max(within, 0.0) * (high - low))


MetricValue = float | Histogram
"""Value of a metric."""


def numbers(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    """The metrics that are numbers, without histograms."""
    return {name: value for name, value in metrics.items() if not isinstance(value, Histogram)}
