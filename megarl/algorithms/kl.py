"""Estimates of KL(policy || reference) from the tokens that the policy sampled.

See http://joschu.net/blog/kl-approx.html; d = log pi_ref(token) - log pi(token). The estimate -d ("k1") is not among
them: its gradient, that of log pi, is 0 in the mean, so as a loss it adds noise and nothing else.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

# exp of more would overflow; beyond it the k3 estimate stays where it is.
_LARGEST_LOG_RATIO = 20.0


def k2(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """d^2 / 2 [T]: low variance, biased; its gradient on-policy is that of the KL."""
    return 0.5 * (reference_log_probs - log_probs).square()


def k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """exp(d) - 1 - d [T]: unbiased and never negative, the estimate of GRPO (arXiv:2402.03300, equation 4)."""
    difference = (reference_log_probs - log_probs).clamp(max=_LARGEST_LOG_RATIO)
    # expm1 keeps the digits that exp(d) - 1 loses where the two policies nearly agree.
    return difference.expm1() - difference


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k2": k2, "k3": k3}
