"""Which sequences make a micro-batch: the same work for every data-parallel rank, at every moment."""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from converters.errors import UserError
from megatron_ext.shared_prefixes import SHORTEST_PREFIX

Cut = list[list[list[int]]]
"""The sequences of each micro-batch of each data-parallel rank."""


class Prefixes(NamedTuple):
    """The beginnings that sequences share, where the trainer computes these once."""

    families: NDArray[np.int64]
    """Sequences of the same family share a prefix."""
    lengths: NDArray[np.int64]
    """Its tokens: the same number for all of a family."""

    def select(self, sequences: NDArray[np.int64]) -> "Prefixes":
        """The prefixes of some of the sequences."""
        return Prefixes(self.families[sequences], self.lengths[sequences])


def assign(
    lengths: Sequence[int] | Tensor,
    data_parallel_size: int,
    max_tokens: int,
    unit: int = 1,
    count_multiple: int = 1,
    attention_length: float = inf,
    prefixes: Prefixes | None = None,
) -> Cut:
    """Sequence indices for every micro-batch of every data-parallel rank: result[rank][micro_batch].

    Every sequence appears once; no micro-batch exceeds `max_tokens` (before alignment); all ranks get the same
    number of micro-batches, since expert parallelism makes them meet in every layer. A sequence of L tokens costs
    L + L^2 / `attention_length`, see `converters.cost.compute`. Costs are balanced by the
    longest-processing-time rule (Graham 1969): the costliest sequence first, each to the cheapest micro-batch that has
    room; the micro-batches that run at the same time on different ranks are those of similar cost. The number of
    micro-batches is the smallest that a bisection finds feasible among the multiples of `count_multiple`. A list may be
    empty when there are fewer sequences than places. Each `unit` sequences in a row stay together.

    With `prefixes` a family stays together, and its prefix counts once, unless it is too large or ranks would wait for
    the one that has it: families are then cut into 2, 4, 8, ... parts, each with the prefix, until the step is fastest.

    Raises UserError for a sequence, or a unit of several, longer than `max_tokens`.
    """
    each = torch.as_tensor(lengths, dtype=torch.long).view(-1, unit)
    sizes = each.sum(1).tolist()
    costs = (each + each.double().square() / attention_length).sum(1).tolist()
    if sizes and max(sizes) > max_tokens:
        what = "a sequence" if unit == 1 else f"{unit} sequences that belong together,"
        raise UserError(
            f"{what} of {max(sizes)} tokens does not fit a micro-batch of {max_tokens} tokens: "
            "raise loop.max_tokens_per_micro_batch, or limit the prompt and response lengths"
        )
    alone = _Items(sizes, costs, [[unit * i + k for k in range(unit)] for i in range(len(sizes))])
    if prefixes is None or unit > 1:
        return _cut(alone, data_parallel_size, max_tokens, count_multiple)[0]
    best: Cut = []
    fastest = inf
    for items in _families(sizes, prefixes, max_tokens, attention_length):
        # More parts have more prefixes: none of them can be faster any more.
        if sum(items.costs) / data_parallel_size >= fastest:
            break
        cut, time = _cut(items, data_parallel_size, max_tokens, count_multiple)
        if time < fastest:
            best, fastest = cut, time
    return best


@dataclass(frozen=True)
class _Items:
    """Sequences that stay together: for each item its tokens, its cost and its sequences."""

    sizes: Sequence[int]
    costs: Sequence[float]
    members: Sequence[Sequence[int]]


def _families(lengths: Sequence[int], prefixes: Prefixes, max_tokens: int, attention_length: float) -> Iterator[_Items]:
    """The items of families that are whole, then cut into 2, 4, 8, ... parts or as many as they need."""
    families, shared = _by_family(range(len(lengths)), prefixes), prefixes.lengths.tolist()
    parts = 1
    while True:
        members = [
            part
            for family in families
            for part in _parts(family, [lengths[i] for i in family], shared[family[0]], parts, max_tokens)
        ]
        yield _items(members, lengths, shared, attention_length)
        if parts >= max(map(len, families), default=0):
            return
        parts *= 2


def _by_family(sequences: Sequence[int], prefixes: Prefixes) -> list[list[int]]:
    """The sequences that share a prefix; one that is too short to be shared holds nothing together."""
    found: dict[int, list[int]] = {}
    families, lengths = prefixes.select(np.array(sequences, dtype=np.int64))
    for index, family, shared in zip(sequences, families.tolist(), lengths.tolist(), strict=True):
        found.setdefault(family if shared >= SHORTEST_PREFIX else -1 - index, []).append(index)
    return list(found.values())


def _parts(
    family: Sequence[int], lengths: Sequence[int], shared: int, parts: int, max_tokens: int
) -> Iterator[list[int]]:
    """A family in at least `parts` parts of about the same length, each of at most `max_tokens` with its prefix."""
    own = [length - shared for length in lengths]
    longest_first = sorted(range(len(own)), key=lambda place: (-own[place], place))
    count = min(parts, len(own))
    while (bins := _longest_processing_time(own, own, longest_first, count, max_tokens - shared)) is None:
        count += 1
    yield from ([family[place] for place in sorted(each)] for each in bins if each)


def computed(cut: Cut, lengths: Sequence[int], prefixes: Prefixes | None = None) -> tuple[int, int]:
    """How much all micro-batches compute: tokens, and the squares of lengths that their attention takes.

    A prefix of several sequences counts once in each micro-batch. Example: for sequences of 30 and 40 tokens with a
    prefix of 20 in one micro-batch they are 50 tokens, and 30^2 + 40^2 - 20^2.
    """
    micro_batches = list(itertools.chain.from_iterable(cut))
    if prefixes is None:
        found = [_tokens_and_squares(each, lengths, 0) for each in micro_batches]
    else:
        together = [family for each in micro_batches for family in _by_family(each, prefixes)]
        found = [_tokens_and_squares(family, lengths, int(prefixes.lengths[family[0]])) for family in together]
    return sum(tokens for tokens, _ in found), sum(squares for _, squares in found)


def _tokens_and_squares(members: Sequence[int], lengths: Sequence[int], shared: int) -> tuple[int, int]:
    """Tokens, and squares of lengths, of sequences of which several compute a `shared` prefix once."""
    again = (len(members) - 1) * shared
    return sum(lengths[i] for i in members) - again, sum(lengths[i] ** 2 for i in members) - again * shared


def _items(
    members: Sequence[Sequence[int]], lengths: Sequence[int], shared: Sequence[int], attention_length: float
) -> _Items:
    sizes, costs = [], []
    for each in members:
        tokens, pairs = _tokens_and_squares(each, lengths, shared[each[0]])
        sizes.append(tokens)
        costs.append(tokens + pairs / attention_length)
    return _Items(sizes, costs, members)


def _cut(items: _Items, data_parallel_size: int, max_tokens: int, count_multiple: int) -> tuple[Cut, float]:
    """The items of every micro-batch, and how long these take where all ranks meet in each."""
    sizes, costs = items.sizes, items.costs
    step = data_parallel_size * count_multiple
    costliest_first = sorted(range(len(sizes)), key=lambda index: (-costs[index], index))
    low = max(1, -(-sum(sizes) // (max_tokens * step)))
    most = max(low, -(-len(sizes) // step))  # one item each always fits
    # The smallest possible number, or one of the next, is nearly always enough.
    high, further = low, 1
    while (bins := _longest_processing_time(sizes, costs, costliest_first, high * step, max_tokens)) is None:
        low, high, further = high + 1, min(high + further, most), 2 * further
    while low < high:
        middle = (low + high) // 2
        tried = _longest_processing_time(sizes, costs, costliest_first, middle * step, max_tokens)
        if tried is None:
            low = middle + 1
        else:
            high, bins = middle, tried
    dealt = _deal(costs, bins, data_parallel_size)
    of_steps = zip(*dealt, strict=True)
    time = sum(max(sum(costs[index] for index in members) for members in together) for together in of_steps)
    return [[[i for index in members for i in items.members[index]] for members in rank] for rank in dealt], time


def _longest_processing_time(
    sizes: Sequence[int], costs: Sequence[float], costliest_first: Sequence[int], count: int, max_tokens: int
) -> list[list[int]] | None:
    """`count` bins of about the same cost and at most `max_tokens`, or None where the rule finds no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    cheapest = [(0.0, place) for place in range(count)]
    smallest = min(sizes, default=0)
    for index in costliest_first:
        without_room = []
        while cheapest and tokens[cheapest[0][1]] + sizes[index] > max_tokens:
            cost, place = heapq.heappop(cheapest)
            # One that has no room for any other is not looked at again.
            if tokens[place] + smallest <= max_tokens:
                without_room.append((cost, place))
        if not cheapest:
            return None
        cost, place = cheapest[0]
        bins[place].append(index)
        tokens[place] += sizes[index]
        heapq.heapreplace(cheapest, (cost + costs[index], place))
        for each in without_room:
            heapq.heappush(cheapest, each)
    return bins


def _deal(costs: Sequence[float], bins: Sequence[list[int]], ranks: int) -> Cut:
    """Bins to ranks: those of similar cost at the same time, the costliest of them to the rank that has least."""
    cost_of = [sum(costs[index] for index in members) for members in bins]
    costliest_first = sorted(range(len(bins)), key=lambda place: -cost_of[place])
    dealt: Cut = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for start in range(0, len(bins), ranks):
        least_first = sorted(range(ranks), key=lambda rank: totals[rank])
        for rank, place in zip(least_first, costliest_first[start : start + ranks], strict=True):
            dealt[rank].append(sorted(bins[place]))
            totals[rank] += cost_of[place]
    return dealt
