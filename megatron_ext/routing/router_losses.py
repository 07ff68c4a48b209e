"""Router losses that do not depend on how the batch of an optimizer step is split.

megatron-core's losses divide by the tokens of a micro-batch on one rank. Here each is a sum over tokens or sequences
with the denominators of the whole batch, so the contributions of all micro-batches on all ranks add up to the loss.

A layer has E experts and sends each token to K of them. The scores s[t] of token t are the softmax of its logits, or
their sigmoids divided by the sum of these; c[t, e] is 1 if e is one of the K experts with the largest scores, else 0.
As in megatron-core, neither DeepSeek's expert bias nor groups nor a replayed choice affect c. The batch has T tokens
and N sequences, including prompts but not padding. Gradients do not flow through c.

- `z_loss`, (1 / T) sum over t of logsumexp(logits[t])^2: ST-MoE, arXiv 2202.08906, section 3.
- `seq_aux_loss`, (1 / N) sum over sequences q of E / (K T_q^2) sum over e of (sum of c[t, e]) (sum of s[t, e]), with
        the T_q tokens of q: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20.
- `global_aux_loss`, E / (K T^2) sum over e of (sum of c[t, e]) (sum of s[t, e]), over all tokens of the batch:
        arXiv 2501.11873.

The last two are 1 if all experts have the same load. The sum over all layers is added to the objective.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class RoutedTokens(NamedTuple):
    """The real tokens of a micro-batch that one router of this rank sees."""

    rows: Tensor
    """long[M]: rows of the router's input. A row of a shared prefix occurs once for each of its sequences."""
    sequences: Tensor
    """long[M]: the sequence that each row belongs to."""
    lengths: Tensor
    """long[S]: number of tokens of each sequence, including those on other ranks."""

    def to(self, device: torch.device) -> "RoutedTokens":
        """The same on `device`."""
        return RoutedTokens(*(each.to(device, non_blocking=True) for each in self))

    def sums(self, values: Tensor) -> Tensor:
        """Sum over the tokens of each sequence: [rows, E] to [S, E]; differentiable."""
        sums = values.new_zeros(len(self.lengths), values.shape[1])
        return sums.index_add(0, self.sequences, values.index_select(0, self.rows))


@dataclass(frozen=True)
class BatchTotals:
    """The denominators: totals of an optimizer step's batch, over all ranks."""

    tokens: int
    sequences: int


@dataclass(frozen=True)
class Routed:
    """A micro-batch's tokens at a router, what the router computed for them, and totals of the batch."""

    tokens: RoutedTokens
    logits: Tensor
    """float32[rows, E]"""
    chosen: Tensor
    """bool[rows, E]: `topk` of each row."""
    scores: Tensor
    """float32[rows, E]"""
    topk: int
    totals: BatchTotals
    counts: Tensor | None
    """int64[E]: how often the whole batch chooses each expert; None if no loss needs it."""
    group: dist.ProcessGroup
    """The ranks that share the tokens of these sequences."""

    @property
    def scale(self) -> float:
        """E / K."""
        return self.scores.shape[1] / self.topk


def z_loss(routed: Routed) -> Tensor:
    """See the module; the part of these tokens."""
    squares = routed.logits.logsumexp(-1).square()
    return squares.index_select(0, routed.tokens.rows).sum() / routed.totals.tokens


def seq_aux_loss(routed: Routed) -> Tensor:
    """See the module; the part of these tokens."""
    counts = routed.tokens.sums(routed.chosen.float())
    dist.all_reduce(counts, group=routed.group)
    lengths = routed.tokens.lengths[:, None].float()
    of_experts = (counts / lengths) * (routed.tokens.sums(routed.scores) / lengths)
    return of_experts.sum() * routed.scale / routed.totals.sequences


def global_aux_loss(routed: Routed) -> Tensor:
    """See the module; the part of these tokens."""
    assert routed.counts is not None
    scores = routed.scores.index_select(0, routed.tokens.rows).sum(0)
    return (routed.counts / routed.totals.tokens * (scores / routed.totals.tokens)).sum() * routed.scale


ROUTER_LOSSES: Mapping[str, Callable[[Routed], Tensor]] = {
    "z_loss": z_loss,
    "seq_aux_loss": seq_aux_loss,
    "global_aux_loss": global_aux_loss,
}
