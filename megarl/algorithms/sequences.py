"""The sequences of a micro-batch, for objectives whose losses are per sequence."""

import torch
from torch import Tensor

from megarl.algorithms.ragged import Ragged
from megatron_ext.packing.packing import MicroBatch, last_tokens


class Sequences:
    """Per-sequence quantities of a micro-batch with N sequences and T' positions.

    The field `weights` [T'] must be that of `seq_mean_token_sum`: the weight of the whole sequence in the loss at each
    of its trained tokens, 0 at all others. Sums are in float64, to keep precision over thousands of tokens. Values at
    tokens that are not trained on, even NaN, have no effect.
    """

    def __init__(self, micro_batch: MicroBatch) -> None:
        self._fields = micro_batch.fields
        self._others = micro_batch.fields["weights"] == 0
        self._count = len(micro_batch.lengths)
        # The last one is the padding, so there is one even without sequences.
        self._all = Ragged(micro_batch.cu_seqlens.diff().long())
        self._last = last_tokens(micro_batch)

    @property
    def weights(self) -> Tensor:
        """float64[N]: the weight of each sequence; 0 for one without trained tokens."""
        return self.constant("weights")

    def constant(self, name: str) -> Tensor:
        """float64[N] of a field that is constant and >= 0 over the trained tokens of a sequence."""
        values = self._fields[name].double().masked_fill(self._others, 0)
        return torch.segment_reduce(values, "max", lengths=self._all.lengths, initial=0)[: self._count]

    def log_ratio(self, log_probs: Tensor) -> Tensor:
        """float64[N]: log p(trained tokens) - log p_ref(trained tokens), differentiable in `log_probs` [T'].

        The reference is the field `reference_log_probs`.
        """
        reference = self._fields["reference_log_probs"].double().masked_fill(self._others, 0)
        return self._all.sum(log_probs.double().masked_fill(self._others, 0) - reference)[: self._count]

    def at_last_token(self, values: Tensor) -> Tensor:
        """Values [T'] at the last token of each sequence: float64[N], differentiable."""
        return values.double()[self._last]


def halves(difference: Tensor) -> Tensor:
    """1 where `difference` (any shape) is above 0, 1/2 for a tie, 0 below: the accuracy of a comparison."""
    return (difference.sign() + 1) / 2
