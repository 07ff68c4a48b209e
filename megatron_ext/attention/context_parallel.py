"""Context parallelism: every rank of a group holds a part of each sequence, and gets the results of the whole.

A sequence is padded to a multiple of 2 R tokens, for R ranks, and cut into 2 R chunks of the same length. Rank r has
the chunks r and 2 R - 1 - r: attention is causal, so pairing an early chunk with a late one costs the same on every
rank. Megatron-core and Transformer Engine cut packed sequences in the same way.
"""

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_ext.packing.packing import MicroBatch, Part, positions_within


@dataclass(frozen=True)
class ContextPart(Part):
    """The L tokens of a micro-batch that one rank of a context-parallel group computes with.

    `cu_seqlens` and `max_seqlen` are those of whole sequences, with their padding.
    """

    places: Tensor
    """long[T'], the index of each token of the micro-batch in the concatenation of all ranks' tokens."""

    def rows(self) -> tuple[Tensor, Tensor]:
        """See `Part`; padding is in none of them."""
        own = self.tokens.shape[1]
        rows = self.places - own * parallel_state.get_context_parallel_rank()
        tokens = ((rows >= 0) & (rows < own)).nonzero().squeeze(1)
        return rows[tokens], tokens

    def whole(self, values: Tensor) -> Tensor:
        """Gather values [L] of this rank's tokens to those [T'] of the whole micro-batch on every rank; differentiable.

        All ranks compute the same loss from the result, so backward each takes its own tokens' part of the gradient.
        """
        group = parallel_state.get_context_parallel_group()
        gathered = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=group)
        return gathered.index_select(0, self.places)


def cut(micro_batch: MicroBatch, ranks: int, rank: int, align: int) -> ContextPart:
    """The part of `micro_batch` that `rank` of the `ranks` of a group computes with, L a multiple of `align`."""
    bounds = micro_batch.cu_seqlens.long()
    lengths = bounds.diff()
    padded = -(-lengths // (2 * ranks)) * 2 * ranks
    # The remaining padding is one more sequence of whole chunks.
    step = torch.lcm(torch.tensor(2), torch.tensor(align))
    if rest := int(-(padded.sum() // ranks) % step):
        padded = torch.cat([padded, padded.new_tensor([rest * ranks])])
    padded_bounds = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    slots = rank_order(padded_bounds, ranks)
    of_sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    places = slots[padded_bounds[of_sequence] + torch.arange(int(bounds[-1])) - bounds[of_sequence]]
    own = len(slots) // ranks
    mine = slice(rank * own, (rank + 1) * own)
    # The token at each of this rank's places: padding is beyond the last token.
    sources = places.new_full((len(slots),), len(places)).scatter(0, places, torch.arange(len(places)))[mine]
    positions = torch.empty_like(slots).scatter(0, slots, positions_within(padded))[mine]

    records = micro_batch.routed_experts

    def take(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(1)])[sources]

    return ContextPart(
        tokens=take(micro_batch.tokens[0])[None],
        labels=take(micro_batch.labels[0])[None],
        position_ids=positions[None],
        cu_seqlens=padded_bounds.to(torch.int32),
        max_seqlen=int(padded.max()),
        asked=take(micro_batch.asked),
        # Records are numbered as tokens are.
        routed_experts=None if records is None else records._replace(tokens=sources),
        places=places,
    )


def rank_order(bounds: Tensor, ranks: int) -> Tensor:
    """long[T]: where each token of concatenated sequences, with `bounds` long[N + 1], lies in rank order.

    Rank order is all tokens of rank 0, then all tokens of rank 1, ...; every length is a multiple of 2 * `ranks`.

    Example: rank_order(torch.tensor([0, 4]), ranks=2) is [0, 2, 3, 1], as rank 0 has the first and the last token.
    """
    lengths = bounds.diff()
    of_sequence = torch.arange(len(lengths), device=bounds.device).repeat_interleave(lengths)
    half = (lengths // (2 * ranks))[of_sequence]
    position = positions_within(lengths)
    chunk = position // half
    is_late = chunk >= ranks
    rank = torch.where(is_late, 2 * ranks - 1 - chunk, chunk)
    within = position - chunk * half + half * is_late
    return rank * (bounds[-1] // ranks) + bounds[of_sequence] // ranks + within
