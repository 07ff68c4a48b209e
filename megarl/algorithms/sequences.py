"""The sequences of a micro-batch, for objectives whose losses are of whole sequences."""

import torch
from torch import Tensor

from megarl.algorithms.ragged import Ragged
from megatron_ext.packing.packing import MicroBatch, last_tokens


class Sequences:
    """Sequences of a micro-batch as an objective reads them: N sequences, T' indices.

    Its field `weights` [T'] is that of `seq_mean_token_sum`: 0 outside the trained tokens, and at every trained token
    of a sequence the weight that the whole sequence has in the loss. Sums are in float64, so that thousands of tokens
    lose no digits. Values outside the trained tokens, even those that are not numbers, change nothing.
    """

    def __init__(self, micro_batch: MicroBatch) -> None:
        self._fields = micro_batch.fields
        self._others = micro_batch.fields["weights"] == 0
        self._count = len(micro_batch.lengths)
        # Padding is the last of these, so there is one even where no sequence is.
        self._all = Ragged(micro_batch.cu_seqlens.diff().long())
        self._last = last_tokens(micro_batch)

    @property
    def weights(self) -> Tensor:
        """float64[N]: the weight of each sequence; 0 for one without trained tokens."""
        return self.constant("weights")

    def constant(self, name: str) -> Tensor:
        """float64[N] of a field that is the same, and not negative, at all trained tokens of a sequence."""
        values = self._fields[name].double().masked_fill(self._others, 0)
        return torch.segment_reduce(values, "max", lengths=self._all.lengths, initial=0)[: self._count]

    def log_ratio(self, log_probs: Tensor) -> Tensor:
        """float64[N]: log p(trained tokens) - log p_ref(trained tokens), differentiable in `log_probs` [T'].

        The reference is the field `reference_log_probs`.
        """
        reference = self._fields["reference_log_probs"].double().masked_fill(self._others, 0)
        return self._all.sum(log_probs.double().masked_fill(self._others, 0) - reference)[: self._count]

    def at_last_token(self, values: Tensor) -> Tensor:
        """float64[N]: of values [T'], the one at the last token of each sequence; differentiable."""
        return values.double()[self._last]


def halves(difference: Tensor) -> Tensor:
    """How right a comparison is, by the sign of `difference` (any shape): 1 above 0, 1/2 for a tie, 0 below."""
    return (difference.sign() + 1) / 2
