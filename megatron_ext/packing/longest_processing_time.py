"""Dealing by the longest-processing-time rule (Graham 1969): the costliest first, each to the cheapest bin."""

from collections.abc import Sequence
from math import inf

import numpy as np


def costliest_first(costs: Sequence[float]) -> list[int]:
    """The order in which the rule deals."""
    return sorted(range(len(costs)), key=lambda index: (-costs[index], index))


def fill_bins(
    sizes: Sequence[int], costs: Sequence[float], order: Sequence[int], count: int, room: int
) -> list[list[int]] | None:
    """`count` bins of about the same cost and at most `room` in size, or None where the rule finds no place.

    `order` is that of `costliest_first`.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    filled, cost = np.zeros(count, dtype=np.int64), np.zeros(count)
    for index in order:
        # All are looked at: a heap of costs would put back each cheaper one without room, of which there are many.
        has_room = filled <= room - sizes[index]
        place = int(np.where(has_room, cost, inf).argmin())
        if not has_room[place]:
            return None
        bins[place].append(index)
        filled[place] += sizes[index]
        cost[place] += costs[index]
    return bins
