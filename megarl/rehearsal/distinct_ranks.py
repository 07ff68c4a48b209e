"""The distinct ranks of a trainer's world: ranks with equal parts of the model are built once."""

from collections import defaultdict
from dataclasses import dataclass

from converters.layout import Layout, Shape
from converters.layouts.parallel_sizes import ParallelSizes, RankCoordinates


@dataclass(frozen=True)
class DistinctRank:
    """Ranks whose tensors have the same names and shapes, so that building one of them is enough.

    Example: DistinctRank(ranks=(2, 3, 4, 5), stages=(1, 2)) of four pipeline stages of two ranks.
    """

    ranks: tuple[int, ...]
    """All of them, in order."""
    stages: tuple[int, ...]
    """Their pipeline stages."""

    @property
    def rank(self) -> int:
        """The one that is built: the lowest."""
        return self.ranks[0]

    @property
    def first_stage(self) -> int:
        """The stage that has most micro-batches in flight."""
        return self.stages[0]


def distinct_ranks(layout: Layout, parallel: ParallelSizes) -> list[DistinctRank]:
    """The distinct ranks of `layout`, in the order of their lowest ranks.

    Ranks of the same tensor, expert-tensor and pipeline coordinates have equal shapes, since experts are numbered from
    0 on each rank; others are compared by the shapes that the layout gives them. The lowest rank of each kind is also
    the first of its data-parallel group, whose part of the optimizer state is the largest: padding is at the end. With
    FSDP2 it has the most rows.
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
