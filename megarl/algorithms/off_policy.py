"""Distance of the trained policy from the policy that sampled: staleness, and mismatch of engine and trainer."""

from torch import Tensor

from megarl.algorithms.corrections import bounded_ratio, effective_sample_size
from megarl.algorithms.kl import k1, k3
from megarl.algorithms.metrics import Mean, Metrics
from megarl.algorithms.ragged import Ragged


def off_policy_metrics(log_probs: Tensor, rollout_log_probs: Tensor, ragged: Ragged) -> Metrics:
    """Metrics over the trained tokens [T] of N responses; `log_probs` are the trainer's, without gradient.

    With r = pi / pi_rollout, over tokens: the k1 and k3 estimates of KL(rollout || policy), chi-squared E[r^2] - 1,
    and the effective sample size of the weights r as a share. Over responses with trained tokens: the mean perplexity
    under either policy, the mean ratio of the two perplexities, chi-squared of the response's product of r, and the
    largest |difference of the mean log-probs|.
    """
    log_probs, rollout_log_probs = log_probs.double(), rollout_log_probs.double()
    log_ratio = log_probs - rollout_log_probs
    ratio = bounded_ratio(log_ratio)
    present = ragged.lengths > 0
    policy = ragged.mean(log_probs)[present]
    rollout = ragged.mean(rollout_log_probs)[present]
    product = bounded_ratio(ragged.sum(log_ratio)[present])
    return Metrics(
        maxima={"off_policy/log_perplexity_difference_max": largest((rollout - policy).abs()).float()},
        means={
            "off_policy/kl": Mean.of(k1(rollout_log_probs, log_probs)),
            "off_policy/k3": Mean.of(k3(rollout_log_probs, log_probs)),
            "off_policy/chi2_token": Mean.of(ratio.square(), formula=less_one),
            "off_policy/chi2_response": Mean.of(product.square(), formula=less_one),
            "off_policy/effective_sample_size": effective_sample_size(ratio),
            "off_policy/perplexity": Mean.of((-policy).exp()),
            "off_policy/rollout_perplexity": Mean.of((-rollout).exp()),
            "off_policy/perplexity_ratio": Mean.of((rollout - policy).exp()),
        },
    )


def interpolated(rollout_log_probs: Tensor, log_probs: Tensor, staleness: Tensor) -> Tensor:
    """Estimate the log-probs [T] of the proximal policy without a forward pass; `log_probs` have no gradient.

    Interpolates in log-probs between the policy that sampled, d = `staleness` [T] versions ago, and the current one,
    which is on its way to the next version: d / (d + 1) of the way (A-3PO, arXiv:2512.06547). AReaL's "loglinear" takes
    the current policy to be the version before the step, and so goes (d - 1) / d of the way.
    """
    return rollout_log_probs + staleness / (staleness + 1) * (log_probs - rollout_log_probs)


def less_one(mean: Tensor) -> Tensor:
    """The formula of chi-squared from E[r^2]."""
    return mean - 1


def largest(values: Tensor) -> Tensor:
    """Maximum of values [n] >= 0; 0 for an empty tensor."""
    return values.amax() if len(values) else values.new_zeros(())
