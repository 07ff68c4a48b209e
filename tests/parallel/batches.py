"""Ragged batches of random tokens that a train step takes, and how they are dealt to ranks and micro-batches."""

import torch
from torch import Tensor

from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import AGGREGATIONS
from megatron_ext.packing.balance import Cut, assign, computed
from megatron_ext.packing.packing import RaggedBatch
from megatron_ext.packing.prefix_tree import SHORTEST_PREFIX, Prefixes

LENGTHS = (5, 12, 1, 33, 12, 7, 2, 18, 24, 9, 3, 16, 21, 6, 11, 30, 4, 15, 8, 27)
"""Tokens of each sequence, two or more for each of eight data-parallel ranks."""
FAMILIES = ((3, 8), (11, 2), (5, 0), (7, 1), (12, 4), (2, 6), (9, 9), (1, 10)) * 2
"""Tokens with which two sequences go on after the same prompt: two families for each of eight data-parallel ranks."""
SHARED_PROMPT = SHORTEST_PREFIX + 1
PROMPT = 2
"""Tokens of a sequence that do not train: most tokens of a shared prompt do, in each sequence by other advantages."""
VOCABULARY = 63
MICRO_BATCHES = 2


def bare_batch(*, shared_prefixes: bool) -> RaggedBatch:
    """Tokens without what the loss needs; with `shared_prefixes` families of sequences, one after another."""
    generator = torch.Generator().manual_seed(7)

    def drawn(length: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (length,), generator=generator)

    if not shared_prefixes:
        return RaggedBatch(drawn(sum(LENGTHS)), torch.tensor(LENGTHS))
    sequences = []
    for number, lengths in enumerate(FAMILIES):
        prompt = drawn(SHARED_PROMPT + number)
        # In every fourth family the sequences share a second stretch, which a third one does not go through.
        turn = drawn(SHORTEST_PREFIX if number % 4 == 0 else 0)
        sequences += [torch.cat([prompt, turn, drawn(length)]) for length in lengths]
        if len(turn):
            sequences.append(torch.cat([prompt, drawn(lengths[0])]))
    return RaggedBatch(torch.cat(sequences), torch.tensor([len(each) for each in sequences]))


def with_fields(batch: RaggedBatch, log_probs: Tensor) -> RaggedBatch:
    """The batch with policies near `log_probs`, so that some ratios are clipped, and weights of the global batch."""
    generator, lengths = torch.Generator().manual_seed(8), batch.lengths
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    trained = positions >= PROMPT
    advantages = torch.randn(len(batch), generator=generator).repeat_interleave(lengths)

    def near() -> Tensor:
        return log_probs + 0.3 * torch.randn(log_probs.shape, generator=generator)

    responses = (lengths - PROMPT).clamp(min=0)
    weights = torch.zeros(len(trained)).masked_scatter(trained, AGGREGATIONS["token_mean"](responses))
    return batch.with_fields(
        old_log_probs=near(),
        rollout_log_probs=near(),
        reference_log_probs=near(),
        advantages=advantages,
        weights=weights,
    )


def deal(batch: RaggedBatch, sizes: ParallelSizes, multiple: int, *, shared_prefixes: bool) -> Cut:
    """The sequences of each micro-batch of each data-parallel rank, as the trainer deals them."""
    lengths = batch.lengths.tolist()
    prefixes = prefixes_of(batch) if shared_prefixes else None
    tokens = computed([[list(range(len(lengths)))]], lengths, prefixes).tokens
    most = -(-tokens // (MICRO_BATCHES * sizes.data_parallel_size)) + max(lengths) // 2
    return assign(
        lengths, sizes.data_parallel_size, max(most, max(lengths)), count_multiple=multiple, prefixes=prefixes
    )


def prefixes_of(batch: RaggedBatch) -> Prefixes:
    """Beginnings that sequences of `batch` have in common."""
    return Prefixes.of([each.numpy() for each in batch.tokens.split(batch.lengths.tolist())])
