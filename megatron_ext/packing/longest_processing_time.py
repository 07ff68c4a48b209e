"""Dealing by the longest-processing-time rule (Graham 1969): the costliest first, each to the cheapest bin."""

import heapq
from collections.abc import Sequence


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
    filled = [0] * count
    cheapest = [(0.0, place) for place in range(count)]
    smallest = min(sizes, default=0)
    for index in order:
        without_room = []
        while cheapest and filled[cheapest[0][1]] + sizes[index] > room:
            cost, place = heapq.heappop(cheapest)
            # One that has no room for any other is not looked at again.
            if filled[place] + smallest <= room:
                without_room.append((cost, place))
        if not cheapest:
            return None
        cost, place = cheapest[0]
        bins[place].append(index)
        filled[place] += sizes[index]
        heapq.heapreplace(cheapest, (cost + costs[index], place))
        for each in without_room:
            heapq.heappush(cheapest, each)
    return bins
