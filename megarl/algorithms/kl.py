"""Estimates of KL(policy || reference) from the tokens that the policy sampled.

See http://joschu.net/blog/kl-approx.html; d = log pi_ref(token) - log pi(token). A name with a + has the value of the
estimate before it and the gradient of k2 (straight-through). On-policy only k2's expected gradient is the KL's; k1's is
0, k3's is the reverse KL's, abs's is neither.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

KlEstimator = Callable[[Tensor, Tensor], Tensor]

LARGEST_LOG_RATIO = 20.0
"""A policy this far from another is lost anyway, and exp of more overflows in a gradient norm; also verl's value."""


def k1(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """-d [T]: unbiased, of high variance. Its gradient is 0 in the mean, so it is no loss: for the reward."""
    return log_probs - reference_log_probs


def absolute(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """|d| [T]: an upper bound of k1, never negative."""
    return (reference_log_probs - log_probs).abs()


def k2(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """d^2 / 2 [T]: low variance, biased; its gradient on-policy is that of the KL."""
    return 0.5 * (reference_log_probs - log_probs).square()


def k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """exp(d) - 1 - d [T]: unbiased and never negative, the estimate of GRPO (arXiv:2402.03300, equation 4).

    verl cuts the value off at 10, which takes the gradient from the tokens that are furthest away; here it is that of
    d = 20 from there on, and nothing else is cut.
    """
    difference = (reference_log_probs - log_probs).clamp(max=LARGEST_LOG_RATIO)
    # expm1 keeps the digits that exp(d) - 1 loses where the two policies nearly agree.
    return difference.expm1() - difference


def straight_through(estimator: KlEstimator) -> KlEstimator:
    """The estimate with its value and the gradient of k2."""

    def estimate(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
        gradient = k2(log_probs, reference_log_probs)
        return estimator(log_probs, reference_log_probs).detach() + (gradient - gradient.detach())

    return estimate


def importance_weighted(estimate: Tensor, log_ratio: Tensor) -> Tensor:
    """r times the estimate [T], r = pi / pi_sampler, differentiable in both: DeepSeek-V3.2's unbiased KL.

    For an unbiased estimate (k1, k3) the mean over the sampler's tokens is KL(policy || reference) wherever the policy
    has gone, and the mean gradient is the KL's (arXiv:2512.02556, section 3.1); without r, k3 has the gradient of the
    KL in the other direction, without a bound where the policy has left the reference. `log_ratio` [T] is log r.
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
"""The estimates whose mean is the KL, with the gradient of their own value: those that may be importance-weighted."""
