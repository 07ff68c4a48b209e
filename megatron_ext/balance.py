"""Which sequences make a micro-batch: the same work for every data-parallel rank, at every moment."""

import heapq
from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from converters.errors import UserError

Cut = list[list[list[int]]]
"""The sequences of each micro-batch of each data-parallel rank."""


def assign(
    lengths: Sequence[int] | Tensor,
    data_parallel_size: int,
    max_tokens: int,
    unit: int = 1,
    count_multiple: int = 1,
    attention_length: float = inf,
) -> Cut:
    """Sequence indices for every micro-batch of every data-parallel rank: result[rank][micro_batch].

    Every sequence appears once; no micro-batch exceeds `max_tokens` (before alignment); all ranks get the same
    number of micro-batches, since expert parallelism makes them meet in every layer. A sequence of L tokens costs
    L + L^2 / `attention_length`, see `converters.cost.attention_length`. Costs are balanced by the
    longest-processing-time rule (Graham 1969): the costliest sequence first, each to the cheapest micro-batch that has
    room; the micro-batches that run at the same time on different ranks are those of similar cost. The number of
    micro-batches is the smallest that a bisection finds feasible among the multiples of `count_multiple`. A list may be
    empty when there are fewer sequences than places. Each `unit` sequences in a row stay together.

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
    step = data_parallel_size * count_multiple
    costliest_first = sorted(range(len(sizes)), key=lambda index: (-costs[index], index))
    low = max(1, -(-sum(sizes) // (max_tokens * step)))
    most = max(low, -(-len(sizes) // step))  # one sequence each always fits
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
    return [[[unit * i + k for i in members for k in range(unit)] for members in rank] for rank in dealt]


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
