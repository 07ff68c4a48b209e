"""Implicit rewards: a language model as a per-token reward model that is trained on outcomes alone (PRIME)."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from converters.errors import UserError
from megarl.algorithms.metrics import Metrics
from megarl.algorithms.sequences import Sequences, halves
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing.packing import MicroBatch


def implicit_process_rewards(log_probs: Tensor, reference_log_probs: Tensor, beta: float) -> Tensor:
    """beta (log p(token) - log p_ref(token)), the reward of every token [T] (PRIME, arXiv:2502.01456).

    Both log-probs [T] are of the same tokens: p is the implicit reward model, p_ref its initial state.
    """
    return beta * (log_probs - reference_log_probs)


@dataclass(frozen=True)
class ImplicitRewardObjective:
    """Binary cross-entropy of outcomes, with implicit rewards as logits (PRIME, arXiv:2502.01456).

    For each response, with r = beta sum_t (log p(y_t) - log p_ref(y_t)) and its outcome o, the loss is
    -o log sigmoid(r) - (1 - o) log(1 - sigmoid(r)). The loss of a batch is the mean over its responses.
    """

    beta: float = 0.05

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise UserError(f"implicit_reward_model.beta={self.beta} must be above 0: it scales the implicit reward")

    def __call__(self, predictions: LogProbs, micro_batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """Loss (a differentiable scalar) and metrics of one micro-batch.

        Fields [T']: `weights` of `seq_mean_token_sum`; `reference_log_probs`; `outcomes`, the outcome of the response
        in [0, 1] at each of its tokens. Metrics are means over the responses: the loss, and the accuracy, which is the
        share with reward > 0 if outcome > 1/2 and reward < 0 if outcome < 1/2 (ties count half).
        """
        sequences = Sequences(micro_batch)
        outcomes = sequences.constant("outcomes")
        rewards = self.beta * sequences.log_ratio(predictions.log_probs)
        loss = binary_cross_entropy_with_logits(rewards, outcomes, weight=sequences.weights, reduction="sum").float()
        agreement = (sequences.weights * halves(rewards.detach() * (outcomes - 0.5))).sum().float()
        return loss, Metrics(sums={"prime/loss": loss.detach(), "prime/accuracy": agreement})
