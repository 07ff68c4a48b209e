"""The prefix tree of sequences: each of its nodes is computed once in a micro-batch."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

SHORTEST_PREFIX = 16
"""Shorter prefixes are not shared: merging two parts of attention would cost more than computing them again."""

_Key = TypeVar("_Key", bytes, tuple[Any, ...])


class Prefixes(NamedTuple):
    """Common prefixes of N sequences, by an order in which sequences with a common prefix are neighbours."""

    order: NDArray[np.int64]
    """[N]: the place of each sequence in the order."""
    common: NDArray[np.int64]
    """[N]: for sequences in that order, the length of the common prefix with the previous one; 0 for the first."""

    @classmethod
    def of(cls, sequences: Sequence[NDArray[Any]]) -> "Prefixes":
        """Prefixes of token ids."""
        # The big-endian bytes of non-negative numbers sort like the numbers.
        return cls.by_key([each.astype(">u4").tobytes() for each in sequences], common_tokens)

    @classmethod
    def by_key(cls, keys: Sequence[_Key], common: Callable[[_Key, _Key], int]) -> "Prefixes":
        """Prefixes of sequences, ordered by `keys`; `common` gives the length of two keys' common prefix."""
        in_order = sorted(range(len(keys)), key=keys.__getitem__)
        order = np.empty(len(keys), dtype=np.int64)
        order[in_order] = np.arange(len(keys))
        of_neighbours = np.zeros(len(keys), dtype=np.int64)
        for place, (before, after) in enumerate(pairwise(in_order), start=1):
            of_neighbours[place] = common(keys[before], keys[after])
        return cls(order, of_neighbours)

    def select(self, sequences: NDArray[np.int64] | Sequence[int]) -> "Prefixes":
        """The prefixes of some of the sequences, all different."""
        places = self.order[np.asarray(sequences, dtype=np.int64)]
        in_order = places.argsort()
        order = np.empty(len(places), dtype=np.int64)
        order[in_order] = np.arange(len(places))
        return Prefixes(order, self.between(places[in_order]))

    def between(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The `common` of only the sequences at `places`, ascending, of the order."""
        if len(places) < 2:
            return np.zeros(len(places), dtype=np.int64)
        smallest = np.minimum.reduceat(self.common[: places[-1] + 1], places[:-1] + 1)
        return np.concatenate([np.zeros(1, dtype=np.int64), smallest])


def common_tokens(a: bytes, b: bytes) -> int:
    """Length of the common prefix in tokens, of 4 bytes each."""
    shorter = min(len(a), len(b)) // 4
    if a[: 4 * shorter] == b[: 4 * shorter]:
        return shorter
    differs = np.frombuffer(a, np.uint32, shorter) != np.frombuffer(b, np.uint32, shorter)
    return int(differs.argmax())


class PrefixNode(NamedTuple):
    """Tokens [start, stop) of the sequences [first, last), which are the same in all of them."""

    first: int
    last: int
    start: int
    stop: int
    depth: int
    """Number of ancestors."""


def prefix_nodes(lengths: Sequence[int], common: Sequence[int]) -> Iterator[PrefixNode]:
    """Yield the nodes of the prefix tree in depth-first order, for sequences in the order of their `Prefixes`."""
    waiting = [(0, len(lengths), 0, 0)] if len(lengths) else []
    while waiting:
        first, last, start, depth = waiting.pop()
        stop = min(common[first + 1 : last], default=lengths[first])
        is_node = stop > start if last - first == 1 else stop - start >= SHORTEST_PREFIX
        if is_node:
            yield PrefixNode(first, last, start, stop, depth)
            start, depth = stop, depth + 1
        if last - first > 1:
            waiting += [(*each, start, depth) for each in reversed(list(runs(common, first, last, stop + 1)))]


def runs(common: Sequence[int], first: int, last: int, least: int) -> Iterator[tuple[int, int]]:
    """Split sequences [first, last) between neighbours that have fewer than `least` tokens in common."""
    start = first
    for index in range(first + 1, last + 1):
        if index == last or common[index] < least:
            yield start, index
            start = index


class Counted(NamedTuple):
    """The work of sequences in one micro-batch: tokens, and the squared lengths that determine attention's work.

    Example: Counted(50, 2100) for sequences of 30 and 40 tokens with a prefix of 20: 30^2 + 40^2 - 20^2
    """

    tokens: int
    squares: int


def count(lengths: Sequence[int], common: Sequence[int]) -> Counted:
    """Count sequences in the order of their `Prefixes`; shared prefixes count once."""
    tokens = squares = 0
    for _, _, start, stop, _ in prefix_nodes(lengths, common):
        tokens += stop - start
        squares += stop * stop - start * start
    return Counted(tokens, squares)
