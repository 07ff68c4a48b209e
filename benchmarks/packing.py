"""How evenly sequences of varied lengths are distributed over data-parallel ranks, versus verl's Karmarkar-Karp.

The cost counts a model's matrix products and attention; the seconds are those of the distribution. Nothing is computed.
"""

import argparse
import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from math import ceil
from pathlib import Path
from statistics import median

import numpy as np
from machine import at_least_one, describe

from converters.cost.compute import forward_flops
from megarl.planning.refit import read_model
from megatron_ext.packing.balance import Cut, assign

ROOT = Path(__file__).resolve().parent.parent


def sample_lengths(sequences: int, mean: float, sigma: float, longest: int) -> list[int]:
    """Log-normal lengths of prompt plus response, capped at `longest`."""
    generator = np.random.default_rng(0)
    drawn = generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, sequences)
    return np.clip(drawn, 16, longest).astype(int).tolist()


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Partition into `parts` of similar cost by the k-way largest differencing method (Karmarkar and Karp 1982).

    As verl's `seqlen_balancing.karmarkar_karp`: the two most uneven states are merged, largest part with smallest.
    """
    order = count()
    states = []
    for index, cost in enumerate(costs):
        sets = [(cost, [index]), *[(0.0, list[int]()) for _ in range(parts - 1)]]
        states.append((-cost, next(order), sets))
    heapq.heapify(states)
    while len(states) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(states), heapq.heappop(states)
        merged = [(a + b, [*i, *j]) for (a, i), (b, j) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda each: -each[0])
        heapq.heappush(states, (merged[-1][0] - merged[0][0], next(order), merged))
    return [members for _, members in states[0][2]]


def as_verl(lengths: Sequence[int], ranks: int, max_tokens: int, attention: float) -> Cut:
    """Distribute sequences by Karmarkar-Karp, then split each rank's into as many micro-batches as the fullest has."""
    costs = costs_of(lengths, attention)
    of_ranks = karmarkar_karp(costs, ranks)
    micro_batches = max(ceil(sum(lengths[index] for index in members) / max_tokens) for members in of_ranks)
    return [
        [
            [members[place] for place in part]
            for part in karmarkar_karp([costs[index] for index in members], micro_batches)
        ]
        for members in of_ranks
    ]


def by_cost(lengths: Sequence[int], ranks: int, max_tokens: int, attention: float) -> Cut:
    """Distribute as a training run does."""
    return assign(lengths, ranks, max_tokens, attention_length=attention)


def by_tokens(lengths: Sequence[int], ranks: int, max_tokens: int, _attention: float) -> Cut:
    """Distribute as if attention were free."""
    return assign(lengths, ranks, max_tokens)


CONTENDERS: Mapping[str, Callable[[Sequence[int], int, int, float], Cut]] = {
    "megarl": by_cost,
    "megarl, by tokens alone": by_tokens,
    "Karmarkar-Karp, as verl": as_verl,
}


def costs_of(lengths: Sequence[int], attention: float) -> list[float]:
    """Cost of each sequence, in units of a token's cost without attention."""
    return [length + length**2 / attention for length in lengths]


def measure(deal: Callable[[], Cut], lengths: Sequence[int], attention: float) -> str:
    """The figures of a contender."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        cut = deal()
        seconds.append(time.process_time() - start)
    costs = costs_of(lengths, attention)
    of_micro_batches = np.array([[sum(costs[i] for i in members) for members in rank] for rank in cut])
    of_ranks = of_micro_batches.sum(1)
    # With expert parallelism all ranks synchronise in every layer: a micro-batch takes as long as its slowest rank's.
    in_step = of_micro_batches.max(0).sum()
    largest = max(sum(lengths[i] for i in members) for rank in cut for members in rank)
    slowest, together = of_ranks.max() / of_ranks.mean(), in_step / of_ranks.mean()
    return f"{of_micro_batches.shape[1]} | {slowest:.4f} | {together:.4f} | {largest:,} | {median(seconds):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=at_least_one, default=8192)
    parser.add_argument("--ranks", type=at_least_one, default=64, help="data-parallel ranks")
    parser.add_argument("--mean", type=at_least_one, default=6000, help="tokens of a sequence, before the cut")
    parser.add_argument("--longest", type=at_least_one, default=32768)
    parser.add_argument("--max-tokens", type=at_least_one, default=32768, help="of a micro-batch")
    parser.add_argument("--model", default="qwen3_235b", help="whose costs count: a name or a folder, as in a plan")
    options = parser.parse_args()
    length = forward_flops(read_model(options.model)).attention_length
    print(f"Machine: {describe(ROOT)}\n")
    print(
        f"{options.sequences:,} sequences of {options.mean:,} tokens in the mean, at most {options.longest:,}, to"
        f" {options.ranks} ranks in micro-batches of {options.max_tokens:,} tokens; attention of {length:,.0f} tokens"
        f" costs what all else of them does ({options.model})\n"
    )
    print("| sigma | | micro-batches | slowest rank / mean | all in step / mean | largest, tokens | CPU s |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for sigma in (0.6, 1.0, 1.4):
        lengths = sample_lengths(options.sequences, options.mean, sigma, options.longest)
        for name, deal in CONTENDERS.items():
            row = measure(partial(deal, lengths, options.ranks, options.max_tokens, length), lengths, length)
            print(f"| {sigma} | {name} | {row}", flush=True)


if __name__ == "__main__":
    main()
