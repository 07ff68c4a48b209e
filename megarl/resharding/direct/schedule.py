"""The order in which a source rank sends: each rank computes its own, and together they keep every port busy."""

from math import gcd

import numpy as np
from numpy.typing import NDArray

_GOLDEN = (5**0.5 - 1) / 2


def sending_order(
    source: int,
    sources: int,
    destinations: int,
    to: NDArray[np.int64],
    part: NDArray[np.int64],
    nbytes: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The order, as indices, in which rank `source` of `sources` sends its messages.

    Message `i` is number `part[i]` of those to rank `to[i]` of `destinations` and has `nbytes[i]` > 0 bytes. Messages
    to one destination stay in the order of their numbers.

    Destinations and sources lie on one ring, and a source begins with the destination at its own place, so that sources
    in lockstep never share a destination. They stay in lockstep while messages have one size: destinations are
    therefore grouped by message size, in powers of two, the largest first. Within a group every destination gets its
    first message, then every one its second: a destination to which several sources send much would otherwise hold up
    all of them at once.
    """
    largest = np.zeros(destinations, np.int64)
    np.maximum.at(largest, to, nbytes)
    power = np.frexp(largest[to].astype(np.float64))[1]
    distance = (_place(to, destinations) - _place(np.array([source]), sources)) % 1.0
    return np.lexsort((to, distance, part, -power))


def _place(rank: NDArray[np.int64], ranks: int) -> NDArray[np.float64]:
    """The place of each `rank` on a ring of length 1 that `ranks` ranks share evenly.

    Consecutive ranks are placed far apart: they often share a pipeline stage and have equally much to send. Side by
    side, they would make one part of the ring finish before the others.
    """
    stride = max(1, round(ranks * _GOLDEN))
    while gcd(stride, ranks) > 1:
        stride += 1
    return (rank * stride % ranks + 0.5) / ranks
