"""Estimates of KL(policy || reference) from the tokens that the policy sampled.

See http://joschu.net/blog/kl-approx.html; d = log pi_ref(token) - log pi(token). An estimator with a + has the value of
the one before the + and the gradient of k2 (straight-through). On-policy, only k2 has the KL's gradient in expectation;
k1's is 0, k3's is that of the KL in the other direction, and abs's is neither.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

KlEstimator = Callable[[Tensor, Tensor], Tensor]

LARGEST_LOG_RATIO = 20.0
"""A policy this far from another is lost anyway, and exp of more overflows in a gradient norm. verl's value, too."""


def k1(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """-d [T]: unbiased, high variance. Its expected gradient is 0, so use it in the reward, not as a loss."""
    return log_probs - reference_log_probs


def absolute(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """|d| [T]: an upper bound of k1, never negative."""
    return (reference_log_probs - log_probs).abs()


def k2(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """d^2 / 2 [T]: low variance, biased; on-policy its expected gradient is that of the KL."""
    return 0.5 * (reference_log_probs - log_probs).square()


def k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """exp(d) - 1 - d [T]: unbiased and never negative, the estimator of GRPO (arXiv:2402.03300, equation 4).

    verl clamps the value to at most 10, so the tokens with the largest d have no gradient. Here only d is clamped, to
    at most 20.
    """
    difference = (reference_log_probs - log_probs).clamp(max=LARGEST_LOG_RATIO)
    # expm1 keeps the precision that exp(d) - 1 loses where the two policies nearly agree.
    return difference.expm1() - difference


def straight_through(estimator: KlEstimator) -> KlEstimator:
    """Give an estimator the gradient of k2, and keep its value."""

    def estimate(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
        gradient = k2(log_probs, reference_log_probs)
        return estimator(log_probs, reference_log_probs).detach() + (gradient - gradient.detach())

    return estimate


def importance_weighted(estimate: Tensor, log_ratio: Tensor) -> Tensor:
    """r times the estimate [T] with r = pi / pi_sampler, differentiable in both: DeepSeek-V3.2's unbiased KL.

    For an unbiased estimate (k1, k3), the mean over tokens of the sampler is KL(policy || reference) however far the
    policy has moved since, and the mean gradient is that of this KL (arXiv:2512.02556, section 3.1). Without r, the
    gradient of k3 is that of the KL in the other direction, and unbounded where the policy has left the reference.
    `log_ratio` [T] is log r.
    """
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp() * estimate


KL_ESTIMATORS: Mapping[str, KlEstimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": straight_through(k1),
    "k3+": straight_through(k3),
    "abs+": straight_through(absolute),
}

UNBIASED = ("k1", "k3")
"""Estimators with the KL as their mean and the gradient of their own value: only these may be importance-weighted."""
