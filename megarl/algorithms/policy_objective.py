"""The policy-gradient objective of one step: policy loss, KL to the reference and entropy, with their metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.compatibility import check_algorithm
from megarl.algorithms.corrections import correction_factor, correction_metrics, off_policy_sequence_mask
from megarl.algorithms.kl import KL_ESTIMATORS, importance_weighted, k3
from megarl.algorithms.metrics import Mean, Metrics
from megarl.algorithms.off_policy import interpolated, largest, off_policy_metrics
from megarl.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, TokenLoss, probability_ratio
from megarl.algorithms.policy_losses.ratios import ratio_counts
from megarl.algorithms.ragged import Ragged
from megarl.algorithms.trained_tokens import check_tokens_finite, trained_tokens
from megarl.schema import AlgorithmConfig
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing.packing import MicroBatch, RaggedBatch


@dataclass(frozen=True)
class _Tokens:
    """The T trained tokens of a micro-batch, end to end: tensors are [T]."""

    responses: Ragged
    fields: Mapping[str, Tensor]
    log_probs: Tensor
    """Under the current policy, differentiable."""
    entropy: Tensor
    """Entropy of the current policy, differentiable."""
    old: Tensor
    """Log-probs under the policy in the denominator of the ratios."""
    engine_log_ratio: Tensor
    """log(pi / pi_rollout), which corrections read. pi is the policy of `old`, or with ratio_to=rollout the current."""

    @property
    def present(self) -> Tensor:
        """Log-probs under the current policy, without gradient."""
        return self.log_probs.detach()

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Everything that a policy loss may read."""
        known = {"log_probs": self.log_probs, "old_log_probs": self.old, "responses": self.responses}
        return {**self.fields, **known}


@dataclass(frozen=True)
class PolicyObjective:
    """loss = sum_t weight_t (factor_t policy_loss_t + kl_coefficient kl_t - entropy_coefficient entropy_t).

    `factor` is the product of the corrections and the off-policy mask. With kl_in=reward the loss has no KL term:
    `with_advantages` subtracts the KL from the rewards. Parts are kept by name, so that the objective can be pickled.

    Raises UserError as `check_algorithm` does.
    """

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)

    def with_kl_coefficient(self, coefficient: float) -> "PolicyObjective":
        """Copy with another KL coefficient, for an adaptive one."""
        return PolicyObjective(replace(self.algorithm, kl_coefficient=coefficient))

    def has_kl_in(self, place: str) -> bool:
        """Whether there is a KL to the reference and it belongs to `place`, "loss" or "reward"."""
        return self.algorithm.kl_coefficient > 0 and self.algorithm.kl_in == place

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model has to be kept."""
        return self.algorithm.kl_coefficient > 0 or self._policy_loss.needs_reference

    @property
    def needs_selection(self) -> bool:
        """Whether batches need the field `chosen` of `select`."""
        return self._policy_loss.selection is not None

    def select(self, batch: RaggedBatch, log_probs: Tensor, *, seed: Sequence[int]) -> Tensor:
        """Select the tokens that the loss treats differently: bool[T], the field `chosen` of `batch`.

        `batch` covers a whole optimizer step, since the selection needs statistics of all trained tokens. It has the
        fields `weights`, `advantages` and the log-probs in the denominator of the ratios. `log_probs` [T] are the
        policy's before this optimizer step. `seed` determines a random selection.
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
        chosen = self._policy_loss.select(inputs, generator, self.algorithm.policy_loss_options)
        return torch.zeros_like(trained).masked_scatter(trained, chosen)

    def __call__(self, predictions: LogProbs, micro_batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """Loss (a differentiable scalar) and metrics of one micro-batch of T' positions.

        Fields [T']:

        - `advantages`;
        - `weights`: those of an aggregation over the global batch, 0 at tokens that are not trained on;
        - `rollout_log_probs`: the engine's;
        - `old_log_probs`: of the policy before the step's first update; without the field, that is the current policy;
        - `reference_log_probs`: if the loss needs them; the KL is reported whenever the field is there;
        - `staleness` with interpolated ratios, `on_kept_kv` if engines keep their KV cache over a refit, and `chosen`
          if `needs_selection`.

        Values at tokens that are not trained on, even NaN, have no effect. Raises UserError for a log-prob of a trained
        token that is not finite.

        Corrections use pi_old / pi_rollout, where pi_old is the policy in the denominator of the ratios. With
        ratio_to=rollout that is the engine's policy itself, and corrections use pi / pi_rollout.
        """
        algorithm, tokens = self.algorithm, self._tokens(predictions, micro_batch)
        policy = self._policy_loss(tokens.inputs, algorithm.policy_loss_options)
        factor = correction_factor(algorithm.corrections, tokens.engine_log_ratio, tokens.responses)
        kept, kl = self._off_policy_mask(tokens), self._kl(tokens)

        loss = kept * (factor * policy.loss)
        if algorithm.entropy_coefficient:
            loss = loss - algorithm.entropy_coefficient * tokens.entropy
        if kl is not None and self.has_kl_in("loss"):
            loss = loss + algorithm.kl_coefficient * kl
        total = (tokens.fields["weights"] * loss).sum()

        return total, self._metrics(tokens, policy, factor, kept, kl) | Metrics(sums={"policy/loss": total.detach()})

    def _tokens(self, predictions: LogProbs, micro_batch: MicroBatch) -> _Tokens:
        places, responses, fields = trained_tokens(micro_batch)
        log_probs, entropy = predictions.log_probs[places], predictions.entropy[places]
        present = log_probs.detach()
        check_tokens_finite("policy's log-prob", present, responses, micro_batch.names)
        old = self._anchor(present, fields)
        corrected = present if self.algorithm.ratio_to == "rollout" else old
        return _Tokens(responses, fields, log_probs, entropy, old, corrected - fields["rollout_log_probs"])

    def _off_policy_mask(self, tokens: _Tokens) -> Tensor:
        """0 at tokens that the off-policy mask removes from the policy loss, else 1: [T]."""
        bound = self.algorithm.off_policy_mask
        if bound is None:
            return torch.ones_like(tokens.present)
        return off_policy_sequence_mask(
            tokens.present - tokens.fields["rollout_log_probs"], tokens.fields["advantages"], tokens.responses, bound
        )

    def _kl(self, tokens: _Tokens) -> Tensor | None:
        """Estimate of the KL to the reference [T], differentiable; None without a reference."""
        if not self.has_kl_in("loss") and "reference_log_probs" not in tokens.fields:
            return None
        estimator = KL_ESTIMATORS[self.algorithm.kl_estimator]
        estimate = estimator(tokens.log_probs, tokens.fields["reference_log_probs"])
        if not self.algorithm.kl_unbiased:
            return estimate
        return importance_weighted(estimate, tokens.log_probs - tokens.fields["rollout_log_probs"])

    def _metrics(self, tokens: _Tokens, policy: TokenLoss, factor: Tensor, kept: Tensor, kl: Tensor | None) -> Metrics:
        metrics = _ratio_metrics(tokens)
        metrics |= off_policy_metrics(tokens.present, tokens.fields["rollout_log_probs"], tokens.responses)
        if self._knows_the_old_policy:
            metrics |= _engine_metrics(tokens)
        if self.algorithm.corrections:
            metrics |= correction_metrics(factor, tokens.responses)
        if self.algorithm.off_policy_mask is not None:
            metrics |= Metrics(means={"policy/off_policy_masked": Mean.of(1 - kept)})
        if kl is not None:
            metrics |= Metrics(kl_to_reference=Mean.of(kl))
        return metrics | Metrics(means={name: Mean.of(values) for name, values in policy.metrics.items()})

    @property
    def _policy_loss(self) -> PolicyLoss:
        return POLICY_LOSSES[self.algorithm.policy_loss]

    @property
    def _knows_the_old_policy(self) -> bool:
        """Whether `engine_log_ratio` compares the engine with a policy from before the step's first update.

        Their difference then contains no update of this step.
        """
        return self.algorithm.ratio_to == "old" or self.algorithm.updates_per_step == 1

    def _anchor(self, present: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Log-probs [T] of the policy in the denominator of the ratios; `present`: the current policy's, detached."""
        if self.algorithm.ratio_to == "interpolated":
            return interpolated(fields["rollout_log_probs"], present, fields["staleness"])
        return fields.get(f"{self.algorithm.ratio_to}_log_probs", present)


def _ratio_metrics(tokens: _Tokens) -> Metrics:
    ratio = probability_ratio(tokens.present, tokens.old)
    return Metrics(
        maxima={"policy/ratio_max": largest(ratio)},
        means={
            "policy/entropy": Mean.of(tokens.entropy),
            # The old policy sampled the tokens, so this estimates KL(old || current).
            "policy/kl_to_old": Mean.of(k3(tokens.old, tokens.present)),
            "policy/ratio_mean": Mean.of(ratio),
        },
        histograms={"policy/ratio_histogram": ratio_counts(tokens.present - tokens.old)},
    )


def _engine_metrics(tokens: _Tokens) -> Metrics:
    difference = tokens.engine_log_ratio.abs()
    means = {"log_prob_difference/mean": Mean.of(difference)}
    if "on_kept_kv" in tokens.fields:
        means["staleness/kept_kv_gap"] = Mean.of(difference[tokens.fields["on_kept_kv"]])
    return Metrics(maxima={"log_prob_difference/max": largest(difference)}, means=means)
