"""Assigns sequences to micro-batches so that all data-parallel ranks have the same work at every moment."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf

from torch import Tensor

from converters.errors import UserError
from megatron_ext.packing.longest_processing_time import costliest_first, fill_bins
from megatron_ext.packing.prefix_families import Counter, Families, sequences_of
from megatron_ext.packing.prefix_tree import Counted, Prefixes

Cut = list[list[list[int]]]
"""The sequences of each micro-batch of each data-parallel rank."""


def assign(
    lengths: Sequence[int] | Tensor,
    data_parallel_size: int,
    max_tokens: int,
    unit: int = 1,
    count_multiple: int = 1,
    attention_length: float = inf,
    prefixes: Prefixes | None = None,
) -> Cut:
    """Assign sequence indices to every micro-batch of every data-parallel rank: result[rank][micro_batch].

    Every sequence appears once, and no micro-batch exceeds `max_tokens` (before alignment). All ranks get the same
    number of micro-batches, since with expert parallelism they synchronize in every layer. A sequence of L tokens costs
    L + L^2 / `attention_length`; see `converters.cost.compute`. Costs are balanced by the longest-processing-time rule
    (Graham 1969): the costliest sequence first, each to the cheapest micro-batch that has room. Micro-batches that run
    at the same time on different ranks have similar costs. The number of micro-batches per rank is the smallest
    multiple of `count_multiple` that a bisection finds feasible. Micro-batches may be empty if there are few sequences.
    Each `unit` consecutive sequences stay together.

    With `prefixes`, a prefix that sequences of a micro-batch share counts once, since it is computed once. Families of
    sequences with a common prefix stay together, unless they are too large or other ranks would wait for the one that
    has them. They are then cut into 2, 4, 8, ... parts, each of which computes the prefix, until the step is fastest.

    Raises UserError for a sequence, or a unit of several, longer than `max_tokens`.
    """
    counter = Counter([int(length) for length in lengths], prefixes)
    units = [sequences_of([number], unit) for number in range(len(lengths) // unit)]
    _check_sizes([counter(each).tokens for each in units], unit, max_tokens)
    dealer = _Dealer(counter, attention_length, data_parallel_size, max_tokens, count_multiple)
    if prefixes is None:
        return dealer.deal(units)[0]
    families = Families(len(units), unit, prefixes, counter, max_tokens)
    best: Cut = []
    fastest = inf
    for members in _more_and_more_parts(families, unit):
        # More parts compute more prefixes, so none of the following can be faster.
        if dealer.time_if_even(members, families.shared) >= fastest:
            break
        cut, time = dealer.deal(members, families.shared)
        if time < fastest:
            best, fastest = cut, time
    return best


def _check_sizes(sizes: Sequence[int], unit: int, max_tokens: int) -> None:
    if sizes and max(sizes) > max_tokens:
        what = "a sequence" if unit == 1 else f"{unit} sequences that belong together,"
        raise UserError(
            f"{what} of {max(sizes)} tokens does not fit a micro-batch of {max_tokens} tokens: "
            "raise loop.max_tokens_per_micro_batch, or limit the prompt and response lengths"
        )


def _more_and_more_parts(families: Families, unit: int) -> Iterator[list[list[int]]]:
    """Yield the sequences grouped by family, then by 2, 4, 8, ... parts of each, or more if a part is too long."""
    parts = 1
    while True:
        yield [sequences_of(units, unit) for units in families.parts(parts)]
        if parts >= families.largest:
            return
        parts *= 2


def computed(cut: Cut, lengths: Sequence[int], prefixes: Prefixes | None = None) -> Counted:
    """Count the work of all micro-batches; prefixes that sequences of a micro-batch share count once."""
    counter = Counter(lengths, prefixes)
    counted = [counter(each) for each in chain.from_iterable(cut)]
    return Counted(sum(each.tokens for each in counted), sum(each.squares for each in counted))


@dataclass(frozen=True)
class _Dealer:
    """Distributes items, each a list of sequences that stay together, over micro-batches and ranks."""

    counter: Counter
    attention_length: float
    ranks: int
    max_tokens: int
    count_multiple: int

    def deal(self, items: Sequence[Sequence[int]], shared: int = 0) -> tuple[Cut, float]:
        """Return the sequences of every micro-batch, and the time if all ranks wait for each other in each.

        All items have their first `shared` tokens in common.
        """
        bins = self._bins(items, shared)
        costs = [self._cost(self.counter(each)) for each in bins]
        return _deal(costs, bins, self.ranks), sum(sorted(costs, reverse=True)[:: self.ranks])

    def time_if_even(self, items: Sequence[Sequence[int]], shared: int) -> float:
        """The time if all ranks had the same work, without the `shared` tokens: a lower bound."""
        return sum(cost for _, cost in self._beyond(items, shared)) / self.ranks

    def _bins(self, items: Sequence[Sequence[int]], shared: int) -> list[list[int]]:
        beyond = self._beyond(items, shared)
        sizes, costs = [tokens for tokens, _ in beyond], [cost for _, cost in beyond]
        order, step, room = costliest_first(costs), self.ranks * self.count_multiple, self.max_tokens - shared
        low = max(1, -(-sum(sizes) // (max(1, room) * step)))
        most = max(low, -(-len(sizes) // step))  # one item each always fits

        def fill(count: int) -> list[list[int]] | None:
            filled = fill_bins(sizes, costs, order, count * step, room)
            return filled and [sorted(chain.from_iterable(items[item] for item in each)) for each in filled]

        # The smallest possible number, or one of the next, is nearly always enough.
        high, further = low, 1
        while (bins := fill(high)) is None:
            low, high, further = high + 1, min(high + further, most), 2 * further
        while low < high:
            middle = (low + high) // 2
            tried = fill(middle)
            if tried is None:
                low = middle + 1
            else:
                high, bins = middle, tried
        # A prefix of one item may be too short to be shared after other items have split it.
        while high < most and any(self.counter(each).tokens > self.max_tokens for each in bins):
            high += 1
            bins = fill(high) or bins
        return bins

    def _beyond(self, items: Sequence[Sequence[int]], shared: int) -> list[tuple[int, float]]:
        """The tokens and the cost of each item, without those of the prefix common to all."""
        counted = [self.counter(each) for each in items]
        before = self._cost(Counted(shared, shared * shared))
        return [(each.tokens - shared, self._cost(each) - before) for each in counted]

    def _cost(self, counted: Counted) -> float:
        return counted.tokens + counted.squares / self.attention_length


def _deal(costs: Sequence[float], bins: Sequence[list[int]], ranks: int) -> Cut:
    """Assign bins to ranks: those of similar cost run at the same time, the costliest on the rank with least work."""
    dealt: Cut = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    most_costly_first = sorted(range(len(bins)), key=lambda place: -costs[place])
    for start in range(0, len(bins), ranks):
        least_first = sorted(range(ranks), key=lambda rank: totals[rank])
        for rank, place in zip(least_first, most_costly_first[start : start + ranks], strict=True):
            dealt[rank].append(bins[place])
            totals[rank] += costs[place]
    return dealt
