"""Groups sequences with a common prefix, which a micro-batch computes once."""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import chain

import numpy as np

from megatron_ext.packing.longest_processing_time import costliest_first, fill_bins
from megatron_ext.packing.prefix_tree import SHORTEST_PREFIX, Counted, Prefixes, count, runs

Units = list[int]
"""Indices of units; a unit is one sequence, or several that stay together."""


class Counter:
    """Counts the work for sequences in the same micro-batch."""

    def __init__(self, lengths: Sequence[int], prefixes: Prefixes | None) -> None:
        self._lengths = lengths
        self._prefixes = prefixes

    def __call__(self, sequences: Sequence[int]) -> Counted:
        """Count these sequences, all different."""
        if self._prefixes is None or len(sequences) == 1:
            lengths = [self._lengths[sequence] for sequence in sequences]
            return Counted(sum(lengths), sum(length * length for length in lengths))
        places = self._prefixes.order[np.array(sequences, dtype=np.int64)]
        in_order = places.argsort()
        common = self._prefixes.between(places[in_order])
        return count([self._lengths[sequences[place]] for place in in_order.tolist()], common.tolist())


class Families:
    """Units whose sequences share prefixes, as a tree; a unit of several has the place of its first sequence.

    A family has at least `SHORTEST_PREFIX` tokens in common beyond the first `shared` tokens, which all units have in
    common.
    """

    def __init__(self, units: int, unit: int, prefixes: Prefixes, counter: Counter, max_tokens: int) -> None:
        firsts = prefixes.select(range(0, units * unit, unit))
        self._units: Units = firsts.order.argsort().tolist()
        self._common: list[int] = firsts.common.tolist()
        self._unit, self._counter, self._max_tokens = unit, counter, max_tokens
        common_to_all = min(self._common[1:], default=0)
        self.shared = common_to_all if common_to_all >= SHORTEST_PREFIX else 0
        self._families = list(runs(self._common, 0, units, self.shared + SHORTEST_PREFIX))
        self._tokens_between = cache(lambda first, last: self._tokens(self._units[first:last]))

    @property
    def largest(self) -> int:
        """Number of units in the largest family."""
        return max((last - first for first, last in self._families), default=0)

    def parts(self, count: int) -> Iterator[Units]:
        """Yield the units of each part of each family: at least `count` per family, or more if one is too large."""
        for first, last in self._families:
            if count == 1 and self._tokens_between(first, last) <= self._max_tokens:
                yield sorted(self._units[first:last])
            else:
                yield from self._parts(first, last, count)

    def _parts(self, first: int, last: int, count: int) -> Iterator[Units]:
        """Yield parts with about equally many tokens after the common prefix, and at most `max_tokens` with it."""
        shared = self._before(first, last)
        room = self._max_tokens - shared
        own = self._tokens_between(first, last) - shared
        together = list(self._subtrees(first, last, min(room, own // count) + shared))
        sizes = [self._tokens_between(*each) - shared for each in together]
        order = costliest_first(sizes)
        least = max(count, -(-sum(sizes) // max(1, room)))
        for bins in map(partial(fill_bins, sizes, sizes, order, room=room), range(least, len(together))):
            parts = [sorted(chain(*(self._units[slice(*together[place])] for place in each))) for each in bins or []]
            if bins and all(self._tokens(part) <= self._max_tokens for part in parts):
                yield from filter(None, parts)
                return
        yield from (sorted(self._units[slice(*each)]) for each in together)

    def _subtrees(self, first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
        """The largest subtrees of units [first, last), below their common prefix, with at most `most` tokens."""
        for below in runs(self._common, first, last, self._before(first, last) + SHORTEST_PREFIX):
            if below[1] - below[0] == 1 or self._tokens_between(*below) <= most:
                yield below
            else:
                yield from self._subtrees(*below, most)

    def _before(self, first: int, last: int) -> int:
        """Number of tokens that units [first, last) have in common."""
        return min(self._common[first + 1 : last], default=0)

    def _tokens(self, units: Units) -> int:
        return self._counter(sequences_of(units, self._unit)).tokens


def sequences_of(units: Sequence[int], unit: int) -> list[int]:
    """The indices of the sequences of `units`, which have `unit` sequences each."""
    return [unit * each + place for each in units for place in range(unit)]
