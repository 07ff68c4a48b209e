"""The policy-gradient objective of one step: policy loss, KL to the reference and entropy, with their metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.kl import KL_ESTIMATORS, k3
from megarl.algorithms.metrics import Metrics
from megarl.algorithms.policy_losses import POLICY_LOSSES, probability_ratio
from megarl.algorithms.registry import lookup
from megarl.config.schema import AlgorithmConfig
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing import MicroBatch


@dataclass(frozen=True)
class PolicyObjective:
    """loss = sum_t weight_t (policy_loss_t + kl_coefficient * kl_t - entropy_coefficient * entropy_t).

    Parts are given by the names of POLICY_LOSSES and KL_ESTIMATORS, so that the objective travels between processes.
    """

    policy_loss: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_estimator: str = "k3"
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        lookup(POLICY_LOSSES, "algorithm.policy_loss", self.policy_loss)
        lookup(KL_ESTIMATORS, "algorithm.kl_estimator", self.kl_estimator)
        for name in ("clip_low", "clip_high", "kl_coefficient"):
            if not getattr(self, name) >= 0:
                raise UserError(f"algorithm.{name} must be at least 0, not {getattr(self, name)}")

    @classmethod
    def from_config(cls, config: AlgorithmConfig) -> "PolicyObjective":
        """The objective that `config` describes.

        Raises UserError for a name that is not known, those of the advantage and the aggregation included, and for a
        negative clip bound or KL coefficient.
        """
        lookup(ADVANTAGES, "algorithm.advantage", config.advantage)
        lookup(AGGREGATIONS, "algorithm.aggregation", config.aggregation)
        return cls(
            policy_loss=config.policy_loss,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_estimator=config.kl_estimator,
            kl_coefficient=config.kl_coefficient,
            entropy_coefficient=config.entropy_coefficient,
        )

    def __call__(self, predictions: LogProbs, micro_batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """Loss (a differentiable scalar) and metrics of one micro-batch of T tokens.

        Fields [T]: `advantages`; `weights`, 0 outside the responses and summing to 1 over the global batch;
        `rollout_log_probs` of the engine; `old_log_probs` of the policy before the step's first update, which without
        this field is the present one; `reference_log_probs` where kl_coefficient is not 0. A value outside the
        responses, even one that is not a number, changes nothing.
        """
        fields = micro_batch.fields
        batch = _Responses(predictions, fields)
        old = batch["old_log_probs"] if "old_log_probs" in fields else batch.log_probs.detach()
        policy = POLICY_LOSSES[self.policy_loss](
            batch.log_probs, old, batch["advantages"], clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss = batch.weigh(policy.loss)
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * batch.weigh(batch.entropy)
        sums, maxima = _metrics(batch, old)
        sums |= {name: batch.weigh(values) for name, values in policy.metrics.items()}
        if self.kl_coefficient:
            estimate = KL_ESTIMATORS[self.kl_estimator](batch.log_probs, batch["reference_log_probs"])
            loss = loss + self.kl_coefficient * batch.weigh(estimate)
            sums["policy/kl_to_reference"] = batch.weigh(estimate)
        sums["policy/loss"] = loss
        return loss, Metrics(
            {name: value.detach() for name, value in sums.items()},
            {name: value.detach() for name, value in maxima.items()},
        )


class _Responses:
    """The tokens with a weight; values of all others read 0."""

    def __init__(self, predictions: LogProbs, fields: Mapping[str, Tensor]) -> None:
        self._fields = fields
        self._weights = fields["weights"]
        self._others = self._weights == 0
        self.log_probs = self._inside(predictions.log_probs)
        self.entropy = self._inside(predictions.entropy)

    def __getitem__(self, name: str) -> Tensor:
        return self._inside(self._fields[name])

    def weigh(self, values: Tensor) -> Tensor:
        """Weighted sum of values [T] that were computed from these."""
        return (self._weights * values).sum()

    def largest(self, values: Tensor) -> Tensor:
        """Largest over the responses of values [T] that are never negative; 0 without any response token."""
        return self._inside(values).amax()

    def _inside(self, values: Tensor) -> Tensor:
        return values.masked_fill(self._others, 0)


def _metrics(batch: _Responses, old_log_probs: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    log_probs = batch.log_probs.detach()
    ratio = probability_ratio(log_probs, old_log_probs)
    difference = (old_log_probs - batch["rollout_log_probs"]).abs()
    sums = {
        "policy/entropy": batch.weigh(batch.entropy.detach()),
        # The old policy sampled the tokens, so the estimate is of KL(old || present).
        "policy/kl_to_old": batch.weigh(k3(old_log_probs, log_probs)),
        "policy/ratio_mean": batch.weigh(ratio),
        "log_prob_difference/mean": batch.weigh(difference),
    }
    maxima = {"policy/ratio_max": batch.largest(ratio), "log_prob_difference/max": batch.largest(difference)}
    return sums, maxima
