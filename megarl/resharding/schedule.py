"""In which order a source rank sends: a rule that each rank follows alone, and that keeps every port busy."""

import numpy as np
from numpy.typing import NDArray


def sending_order(
    source: int,
    sources: int,
    destinations: int,
    to: NDArray[np.int64],
    part: NDArray[np.int64],
    nbytes: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The order, as indices, in which rank `source` of `sources` sends its messages.

    Message `i` is number `part[i]` of those to rank `to[i]` of `destinations` and has `nbytes[i]` > 0 bytes. Those to
    one destination stay in the order of their numbers.

    Destinations and sources lie on one ring, and a source begins with the destination at its own place: so the
    sources, all at the same pace, are never at the same destination. They keep pace where messages are of one size.
    Destinations of large messages therefore come first, by powers of two; of one size, each gets its first message,
    then each its second, since one to which several sources have much to send would hold up all of them at once.
    """
    largest = np.zeros(destinations, np.int64)
    np.maximum.at(largest, to, nbytes)
    power = np.frexp(largest[to].astype(np.float64))[1]
    distance = ((to + 0.5) / destinations - (source + 0.5) / sources) % 1.0
    return np.lexsort((to, distance, part, -power))
