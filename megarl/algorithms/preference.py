"""Objectives on pairs of a chosen and a rejected reply: DPO (and SPIN), and the reward model's.

Batches have `unit` 2: sequence 2i is the chosen reply of pair i, sequence 2i + 1 the rejected one, each after its
prompt. The field `weights` is that of `seq_mean_token_sum`, so each of P pairs has the weight 1 / P.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from converters.errors import UserError
from megarl.algorithms.metrics import Metrics
from megarl.algorithms.sequences import Sequences, halves
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing.packing import MicroBatch


@dataclass(frozen=True)
class PreferenceObjective:
    """Direct preference optimization (arXiv:2305.18290, equation 7), with label smoothing e.

    For each pair, with the margin m = log(p(chosen) / p_ref(chosen)) - log(p(rejected) / p_ref(rejected)) of summed
    log-probs, the loss is -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m). e is the assumed share of flipped
    preferences (conservative DPO; the paper has 0). The loss of a batch is the mean over its pairs.

    With human replies as chosen, and as rejected the replies of an earlier policy, which also is the reference, this is
    SPIN (arXiv:2401.01335, equation 4.7 with the logistic loss and lambda = beta).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise UserError(f"preference.beta={self.beta} must be above 0: it scales the preference that is learned")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(
                f"preference.label_smoothing={self.label_smoothing} must be at least 0 and below 0.5: it is the share "
                "of wrong labels, and from a half on they would say nothing, or the opposite"
            )

    def __call__(self, predictions: LogProbs, micro_batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """Loss (a differentiable scalar) and metrics of one micro-batch of whole pairs.

        Fields [T']: `weights` and `reference_log_probs`. Metrics are means over the pairs: the loss, the accuracy (the
        share with a positive margin; ties count half, so a policy equal to its reference has 0.5), beta times the
        margin, and the two log-ratios in nats.
        """
        sequences = Sequences(micro_batch)
        chosen, rejected = _of_pairs(sequences.log_ratio(predictions.log_probs))
        margin = chosen - rejected
        right, wrong = logsigmoid(self.beta * margin), logsigmoid(-self.beta * margin)
        loss = -(1 - self.label_smoothing) * right - self.label_smoothing * wrong
        return _weighed(
            sequences,
            loss,
            {
                "preference/accuracy": halves(margin),
                "preference/margin": self.beta * margin,
                "preference/chosen_log_ratio": chosen,
                "preference/rejected_log_ratio": rejected,
            },
        )


@dataclass(frozen=True)
class RewardModelObjective:
    """The Bradley-Terry likelihood of preferences (arXiv:2203.02155, equation 1): -log sigmoid(s_chosen - s_rejected).

    The score s of a sequence is the value at its last token. The loss of a batch is the mean over its pairs.
    """

    def __call__(self, predictions: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """Loss (a differentiable scalar) and metrics of one micro-batch of whole pairs; predictions are values [T'].

        Field [T']: `weights`. Metrics are means over the pairs: the loss, the accuracy (the share of pairs in the right
        order; ties count half), the margin and the two scores.
        """
        sequences = Sequences(micro_batch)
        chosen, rejected = _of_pairs(sequences.at_last_token(predictions))
        margin = chosen - rejected
        return _weighed(
            sequences,
            -logsigmoid(margin),
            {
                "preference/accuracy": halves(margin),
                "preference/margin": margin,
                "preference/chosen_score": chosen,
                "preference/rejected_score": rejected,
            },
        )


def _of_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    chosen, rejected = values.view(-1, 2).unbind(1)
    return chosen, rejected


def _weighed(sequences: Sequences, loss: Tensor, metrics: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
    weights = sequences.weights.view(-1, 2).sum(1)
    total = (weights * loss).sum().float()
    sums = {name: (weights * values.detach()).sum().float() for name, values in metrics.items()}
    return total, Metrics(sums={"preference/loss": total.detach(), **sums})
