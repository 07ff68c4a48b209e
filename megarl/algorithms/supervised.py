"""The objective of supervised fine-tuning."""

from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.metrics import Metrics
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing.packing import MicroBatch


@dataclass(frozen=True)
class SftObjective:
    """loss = sum_t weight_t * -log p(token_t)."""

    def __call__(self, predictions: LogProbs, micro_batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """Loss (a differentiable scalar) and metrics of one micro-batch of T tokens.

        Fields [T]: `weights`, 0 outside the responses and summing to 1 over the global batch. Metrics: the loss, and
        the share of response tokens that are the most likely ones after the tokens before them.
        """
        weights = micro_batch.fields["weights"]
        loss = (weights * -predictions.log_probs.masked_fill(weights == 0, 0)).sum()
        accuracy = (weights * predictions.greedy).sum()
        return loss, Metrics(sums={"sft/loss": loss.detach(), "sft/token_accuracy": accuracy})


def exact_matches(greedy: Tensor, responses: Tensor, lengths: Tensor) -> Tensor:
    """Whether greedy decoding would reproduce the response of each of N sequences: bool[N].

    `greedy` bool[T]: whether a token is the most likely one after the tokens before it. `responses` bool[T]: which
    tokens count. `lengths` long[N]: lengths of the sequences, end to end. Greedy decoding reproduces a response exactly
    if all of its tokens are greedy; a sequence without response tokens counts as reproduced.
    """
    wrong = (responses & ~greedy).long()
    sequence = lengths.new_tensor(range(len(lengths))).repeat_interleave(lengths)
    return lengths.new_zeros(len(lengths)).index_add(0, sequence, wrong) == 0
