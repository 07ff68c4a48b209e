"""The longest-processing-time rule (Graham 1969): the costliest item first, each to the cheapest bin."""

from collections.abc import Sequence
from math import inf

import numpy as np


def costliest_first(costs: Sequence[float]) -> list[int]:
    """The indices in order of decreasing cost, in which the rule assigns items."""
    return sorted(range(len(costs)), key=lambda index: (-costs[index], index))


def fill_bins(
    sizes: Sequence[int], costs: Sequence[float], order: Sequence[int], count: int, room: int
) -> list[list[int]] | None:
    """Fill `count` bins to about the same cost and at most `room` in size; None if the rule finds no place for an item.

    `order` is that of `costliest_first`.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    filled, cost = np.zeros(count, dtype=np.int64), np.zeros(count)
    for index in order:
        # A linear search: from a heap of costs, many cheaper bins without room would have to be popped and pushed back.
        has_room = filled <= room - sizes[index]
        place = int(np.where(has_room, cost, inf).argmin())
        if not has_room[place]:
            return None
        bins[place].append(index)
        filled[place] += sizes[index]
        cost[place] += costs[index]
    return bins
