"""The distinct ranks of a trainer's world: of ranks with equal shapes only one is built."""

from collections import defaultdict
from dataclasses import dataclass

from converters.layout import Layout, Shape
from converters.layouts.parallel_sizes import ParallelSizes, RankCoordinates


@dataclass(frozen=True)
class DistinctRank:
    """Ranks whose tensors have the same names and shapes, so that building one of them is enough.

    Example: DistinctRank(ranks=(2, 3, 4, 5), stages=(1, 2)), of four pipeline stages with two ranks each.
    """

    ranks: tuple[int, ...]
    """All of these ranks, in order."""
    stages: tuple[int, ...]
    """Their pipeline stages."""

    @property
    def rank(self) -> int:
        """The rank that is built: the lowest."""
        return self.ranks[0]

    @property
    def first_stage(self) -> int:
        """The stage with the most micro-batches in flight."""
        return self.stages[0]


def distinct_ranks(layout: Layout, parallel: ParallelSizes) -> list[DistinctRank]:
    """The distinct ranks of `layout`, ordered by their lowest ranks.

    Ranks with the same tensor, expert-tensor and pipeline coordinates have equal shapes, since each rank numbers its
    experts from 0; others are compared by their shapes in the layout. The lowest rank of each kind is also the first of
    its data-parallel group. It has the largest part of the optimizer state, as padding is at the end; with FSDP2 it has
    the most rows.
    """
    by_place: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank in range(parallel.world_size):
        by_place[_place(parallel.coordinates(rank))].append(rank)
    alike: dict[frozenset[tuple[str, Shape]], list[int]] = defaultdict(list)
    for ranks in by_place.values():
        alike[frozenset(layout.local_shapes(ranks[0]).items())] += ranks
    return sorted(
        (
            DistinctRank(tuple(sorted(ranks)), tuple(sorted({parallel.coordinates(rank).pipeline for rank in ranks})))
            for ranks in alike.values()
        ),
        key=lambda each: each.rank,
    )


def _place(at: RankCoordinates) -> tuple[int, int, int]:
    return at.pipeline, at.tensor, at.expert_tensor
