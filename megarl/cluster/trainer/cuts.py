"""Splits a batch over data parallelism and into micro-batches, and joins the ranks' results."""

from collections import deque
from collections.abc import Sequence
from itertools import chain, count
from math import inf

import torch

from megarl.cluster.trainer.batch import Batch
from megarl.cluster.trainer.prefixes import prefixes_of
from megarl.data.packed_stretches import Packed, unpacked
from megarl.data.stretches import Values
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.balance import Cut, assign
from megatron_ext.packing.prefix_tree import Prefixes


class Cutter:
    """Splits the batches of one model; the calls of a step have the same sequences, which are distributed once.

    Two cuts are cached, because a call for a few responses of the step comes between those for all.
    """

    def __init__(self, options: MegatronOptions, max_tokens: int) -> None:
        self._options, self._max_tokens = options, max_tokens
        self._last: deque[tuple[object, Cut]] = deque(maxlen=2)

    def cut(self, batch: Batch, attention_length: float) -> Cut:
        """See `cut_batch`."""
        if self._options.shared_prefixes:
            # Not cached: prefixes are computed anew for a part of a batch, and are slow to compare.
            return cut_batch(batch, self._options, self._max_tokens, attention_length)
        numbers = batch.mini_batch_of_sequence
        read = batch.lengths.tobytes(), None if numbers is None else numbers.tobytes(), batch.unit, attention_length
        known = next((cut for of, cut in self._last if of == read), None)
        if known is None:
            known = cut_batch(batch, self._options, self._max_tokens, attention_length)
            self._last.append((read, known))
        return known


def cut_batch(batch: Batch, options: MegatronOptions, max_tokens: int, attention_length: float = inf) -> Cut:
    """Cut a batch into a share for each data-parallel rank, in micro-batches of at most `max_tokens`.

    Each mini-batch is split on its own. So the values that a rank computes for its share before the update are the ones
    that it reads in the update, from one array and computed in the same micro-batches.
    """
    ranks, multiple = options.parallel.data_parallel_size, options.micro_batch_multiple
    cut: Cut = [[] for _ in range(ranks)]
    known = prefixes_in(batch, options)
    for sequences in batch.sequences_by_mini_batch():
        lengths = torch.from_numpy(batch.lengths[sequences])
        prefixes = known and known.select(sequences)
        of_ranks = assign(lengths, ranks, max_tokens, batch.unit, multiple, attention_length, prefixes)
        for share, micro_batches in zip(cut, of_ranks, strict=True):
            share.extend(sequences[each].tolist() for each in micro_batches)
    return cut


def prefixes_in(batch: Batch, options: MegatronOptions) -> Prefixes | None:
    """The shared prefixes of sequences, if the ranks compute them once."""
    return (batch.prefixes or prefixes_of(batch.tokens)) if options.shared_prefixes else None


def share_of(batch: Batch, share: Sequence[Sequence[int]]) -> tuple[Batch, list[list[int]]]:
    """Return the sequences of a share, and its micro-batches as indices into it."""
    places = count()
    return batch.select(list(chain.from_iterable(share))), [[next(places) for _ in each] for each in share]


def sequences_in(cut: Cut) -> list[int]:
    """The indices of the batch's sequences, share after share."""
    return [sequence for share in cut for micro_batch in share for sequence in micro_batch]


def in_order(cut: Cut, of_shares: Sequence[Packed]) -> list[Values]:
    """Reorder the shares' values per sequence to the order of the batch."""
    by_sequence = dict(zip(sequences_in(cut), chain.from_iterable(map(unpacked, of_shares)), strict=True))
    return [by_sequence[sequence] for sequence in range(len(by_sequence))]
