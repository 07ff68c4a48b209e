"""The order in which a source rank sends: a rule that each rank follows alone, and that keeps every port busy."""

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

    Destinations and sources lie on one ring, and a source begins with the destination at its own place: so the
    sources, all at the same pace, are never at the same destination. They keep pace where messages are of one size.
    Destinations of large messages therefore come first, by powers of two; of one size, each gets its first message,
    then each its second, since one to which several sources have much to send would hold up all of them at once.
    """
    largest = np.zeros(destinations, np.int64)
    np.maximum.at(largest, to, nbytes)
    power = np.frexp(largest[to].astype(np.float64))[1]
    distance = (_place(to, destinations) - _place(np.array([source]), sources)) % 1.0
    return np.lexsort((to, distance, part, -power))


def _place(rank: NDArray[np.int64], ranks: int) -> NDArray[np.float64]:
    """The place of each `rank` on a ring of length 1 that `ranks` ranks share evenly.

    Ranks that follow each other are far apart: they are often of one pipeline stage and have as little, or as much, to
    send as each other, and some part of the ring would be done before the others.
    """
    stride = max(1, round(ranks * _GOLDEN))
    while gcd(stride, ranks) > 1:
        stride += 1
    return (rank * stride % ranks + 0.5) / ranks
