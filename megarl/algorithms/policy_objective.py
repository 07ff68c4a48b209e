"""The policy-gradient objective of one step: policy loss, KL to the reference and entropy, with their metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.compatibility import check_algorithm
from megarl.algorithms.corrections import correction_factor, correction_metrics, near_or_rewarded
from megarl.algorithms.kl import KL_ESTIMATORS, importance_weighted, k3
from megarl.algorithms.metrics import Mean, Metrics
from megarl.algorithms.off_policy import interpolated, largest, off_policy_metrics
from megarl.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, probability_ratio
from megarl.algorithms.policy_losses.ratios import ratio_counts
from megarl.algorithms.ragged import Ragged
from megarl.algorithms.trained_tokens import check_tokens_finite, trained_tokens
from megarl.schema import AlgorithmConfig
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing.packing import MicroBatch, RaggedBatch


@dataclass(frozen=True)
class PolicyObjective:
    """loss = sum_t weight_t (factor_t policy_loss_t + kl_coefficient kl_t - entropy_coefficient entropy_t).

    The factor is that of the corrections, and of the off-policy mask. With kl_in=reward the loss has no KL: whoever
    makes the rewards subtracts it. Parts are kept by their names, so that the objective travels between processes.

    Raises UserError as `check_algorithm` does.
    """

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)

    def with_kl_coefficient(self, coefficient: float) -> "PolicyObjective":
        """The same with another coefficient of the KL, one that adapts."""
        return PolicyObjective(replace(self.algorithm, kl_coefficient=coefficient))

    def has_kl_in(self, place: str) -> bool:
        """Whether there is a KL to the reference, and it goes there: into the loss, or into the reward."""
        return self.algorithm.kl_coefficient > 0 and self.algorithm.kl_in == place

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model has to be kept."""
        return self.algorithm.kl_coefficient > 0 or self._loss.needs_reference

    @property
    def needs_selection(self) -> bool:
        """Whether batches need the field `chosen` of `select`."""
        return self._loss.selection is not None

    def select(self, batch: RaggedBatch, log_probs: Tensor, *, seed: Sequence[int]) -> Tensor:
        """The tokens that the loss treats apart, bool[T], for the field `chosen` of `batch`.

        `batch` covers a whole optimizer step, with the fields `weights`, `advantages` and the log-probs that ratios are
        taken to; `log_probs` [T] come from the policy before this step. A random choice follows from `seed`. The choice
        needs statistics of all trained tokens, so it cannot be made by a micro-batch.
        """
        trained = batch.fields["weights"] != 0
        log_probs = log_probs[trained].detach()
        fields = {name: values[trained] for name, values in batch.fields.items()}
        inputs = {
            **fields,
            "log_probs": log_probs,
            "old_log_probs": self._anchor(log_probs, fields),
            "responses": Ragged(trained.sum()[None]),
        }
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        chosen = self._loss.select(inputs, generator, self.algorithm.policy_loss_options)
        return torch.zeros_like(trained).masked_scatter(trained, chosen)

    def __call__(self, predictions: LogProbs, micro_batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """Loss (a differentiable scalar) and metrics of one micro-batch of T' places.

        Fields [T']: `advantages`; `weights`, 0 outside the trained tokens, of an aggregation over the global batch;
        `rollout_log_probs` of the engine; `staleness` where ratios are interpolated; `on_kept_kv` where engines keep
        keys and values; `old_log_probs` of the policy before the step's first update, which without this field is the
        present one; `reference_log_probs` where the loss needs them (the KL is reported wherever they are); `chosen`
        where `needs_selection`. A value outside the trained tokens, even one that is not a number, changes nothing.
        Raises UserError for a log-prob inside that is not a finite number.

        Corrections lead from the engine to the policy that ratios are to. Where that is the engine itself, they are of
        the present policy to it.
        """
        places, responses, fields = trained_tokens(micro_batch)
        log_probs, entropy = predictions.log_probs[places], predictions.entropy[places]
        present, rollout = log_probs.detach(), fields["rollout_log_probs"]
        check_tokens_finite("policy's log-prob", present, responses, micro_batch.names)
        old = self._anchor(present, fields)
        compared = present if self.algorithm.ratio_to == "rollout" else old
        inputs = {**fields, "log_probs": log_probs, "old_log_probs": old, "responses": responses}
        policy = self._loss(inputs, self.algorithm.policy_loss_options)
        loss, metrics = policy.loss, _metrics(present, old, entropy.detach())
        metrics = metrics | off_policy_metrics(present, rollout, responses)
        if self._knows_the_old_policy:
            metrics = metrics | _difference(compared - rollout)
            if "on_kept_kv" in fields:
                gap = (compared - rollout)[fields["on_kept_kv"]].abs()
                metrics = metrics | Metrics(means={"staleness/kept_kv_gap": Mean.of(gap)})
        if self.algorithm.corrections:
            factor = correction_factor(self.algorithm.corrections, compared - rollout, responses)
            loss, metrics = factor * loss, metrics | correction_metrics(factor, responses)
        if self.algorithm.off_policy_mask is not None:
            bound = self.algorithm.off_policy_mask
            kept = near_or_rewarded(present - rollout, fields["advantages"], responses, bound)
            loss = kept * loss
            metrics = metrics | Metrics(means={"policy/off_policy_masked": Mean.of(1 - kept)})
        if self.algorithm.entropy_coefficient:
            loss = loss - self.algorithm.entropy_coefficient * entropy
        if self.has_kl_in("loss") or "reference_log_probs" in fields:
            estimate = self._kl(log_probs, rollout, fields["reference_log_probs"])
            metrics = metrics | Metrics(kl_to_reference=Mean.of(estimate))
            if self.has_kl_in("loss"):
                loss = loss + self.algorithm.kl_coefficient * estimate
        total = (fields["weights"] * loss).sum()
        details = {name: Mean.of(values) for name, values in policy.metrics.items()}
        return total, metrics | Metrics(sums={"policy/loss": total.detach()}, means=details)

    def _kl(self, log_probs: Tensor, rollout: Tensor, reference: Tensor) -> Tensor:
        estimate = KL_ESTIMATORS[self.algorithm.kl_estimator](log_probs, reference)
        if not self.algorithm.kl_unbiased:
            return estimate
        return importance_weighted(estimate, log_probs - rollout)

    @property
    def _loss(self) -> PolicyLoss:
        return POLICY_LOSSES[self.algorithm.policy_loss]

    @property
    def _knows_the_old_policy(self) -> bool:
        """Whether what is compared with the engine has not moved since it sampled: they differ by arithmetic alone."""
        return self.algorithm.ratio_to == "old" or self.algorithm.updates_per_step == 1

    def _anchor(self, present: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Log-probs [T] of the policy that ratios are to; those `present` have no gradient."""
        if self.algorithm.ratio_to == "interpolated":
            return interpolated(fields["rollout_log_probs"], present, fields["staleness"])
        return fields.get(f"{self.algorithm.ratio_to}_log_probs", present)


def _metrics(log_probs: Tensor, old: Tensor, entropy: Tensor) -> Metrics:
    ratio = probability_ratio(log_probs, old)
    return Metrics(
        maxima={"policy/ratio_max": largest(ratio)},
        means={
            "policy/entropy": Mean.of(entropy),
            # The tokens are that policy's, so the estimate is of KL(old || present).
            "policy/kl_to_old": Mean.of(k3(old, log_probs)),
            "policy/ratio_mean": Mean.of(ratio),
        },
        histograms={"policy/ratio_histogram": ratio_counts(log_probs - old)},
    )


def _difference(log_ratio: Tensor) -> Metrics:
    difference = log_ratio.abs()
    return Metrics(
        maxima={"log_prob_difference/max": largest(difference)},
        means={"log_prob_difference/mean": Mean.of(difference)},
    )
