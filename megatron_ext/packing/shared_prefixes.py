"""Computes prefixes that sequences of a micro-batch share once, as a tree of nodes.

A node belongs to all sequences that contain it. Its tokens attend to their own node and to its ancestors; the rest of
the model sees each token of a node once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ext.packing.packing import MicroBatch, Part
from megatron_ext.packing.prefix_tree import Prefixes, PrefixNode, prefix_nodes


class Prefix(NamedTuple):
    """A prefix, tokens [start, end), and all of its continuations, tokens [end, stop), one after the other."""

    start: int
    end: int
    stop: int


Level = tuple[Prefix, ...]
"""Disjoint prefixes, none of which continues another, so that every token continues at most one of them."""


@dataclass(frozen=True)
class SharedPart(Part):
    """The L tokens of a micro-batch in which shared prefixes are present once.

    `tokens` and `position_ids` have these L tokens; `cu_seqlens` are the bounds of the concatenated nodes, including
    padding. `labels` and `asked` are those of the whole micro-batch, since the last token of a prefix predicts the
    first token of every continuation. `max_seqlen` is the length of the longest whole sequence.
    """

    places: Tensor
    """long[T']: the index of each of the micro-batch's tokens among the L."""
    levels: tuple[Level, ...]
    bounds: tuple[int, ...]
    """The values of `cu_seqlens` on the host, where attention is planned."""

    @property
    def predicting(self) -> Tensor:
        """long[T']: the index of the token that predicts each label; one of a prefix predicts in several sequences."""
        return self.places

    def rows(self) -> tuple[Tensor, Tensor]:
        """See `Part`; a token of a shared prefix occurs once for each of its sequences."""
        return self.places, torch.arange(len(self.places), device=self.places.device)


def share(micro_batch: MicroBatch, align: int) -> SharedPart:
    """Merge the shared prefixes of `micro_batch`, packed without padding; L is a multiple of `align`.

    Raises ValueError if it has recorded experts: each response may have sent the tokens of a prompt to other experts.
    """
    if micro_batch.routed_experts is not None:
        raise ValueError("a micro-batch with routed experts has no shared prefixes: its sequences are computed whole")
    lengths = micro_batch.lengths.tolist()
    bounds = np.cumsum([0, *lengths])
    sequences = [each.numpy() for each in micro_batch.tokens[0, : bounds[-1]].split(lengths)]
    prefixes = Prefixes.of(sequences)
    in_order = prefixes.order.argsort()
    tree = list(prefix_nodes(micro_batch.lengths.numpy()[in_order].tolist(), prefixes.common.tolist()))
    ends = np.cumsum([each.stop - each.start for each in tree], dtype=np.int64)
    tokens = int(ends[-1]) if tree else 0
    places, sources = np.zeros(micro_batch.tokens.shape[1], dtype=np.int64), np.zeros(tokens, dtype=np.int64)
    for node, end in zip(tree, ends, strict=True):
        own = np.arange(end - (node.stop - node.start), end)
        for sequence in in_order[node.first : node.last]:
            places[bounds[sequence] + node.start : bounds[sequence] + node.stop] = own
        sources[own] = bounds[in_order[node.first]] + np.arange(node.start, node.stop)
    padding = -tokens % align if tokens else align
    source = torch.from_numpy(sources)

    def take(values: Tensor) -> Tensor:
        return torch.cat([values[source], values.new_zeros(padding)])[None]

    own_bounds = (0, *ends.tolist(), *([tokens + padding] if padding else []))
    return SharedPart(
        tokens=take(micro_batch.tokens[0]),
        labels=micro_batch.labels,
        position_ids=take(micro_batch.position_ids[0]),
        cu_seqlens=torch.tensor(own_bounds, dtype=torch.int32),
        max_seqlen=max(micro_batch.max_seqlen, padding),
        asked=micro_batch.asked,
        routed_experts=None,
        places=torch.from_numpy(places),
        levels=_levels(tree, ends),
        bounds=own_bounds,
    )


def _levels(tree: Sequence[PrefixNode], ends: NDArray[np.int64]) -> tuple[Level, ...]:
    firsts = [each.first for each in tree]
    levels: dict[int, list[Prefix]] = {}
    for node, end in zip(tree, ends.tolist(), strict=True):
        after = int(np.searchsorted(firsts, node.last))
        stop = int(ends[after - 1])
        if stop > end:
            levels.setdefault(node.depth, []).append(Prefix(end - (node.stop - node.start), end, stop))
    return tuple(tuple(levels[depth]) for depth in sorted(levels))
