"""Policy losses: per token, what to minimise so that the advantage grows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# exp of more would overflow in the gradient norm; a policy this far from the old one is lost anyway.
_LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class TokenLoss:
    """A loss of every token [T], differentiable, and what there is to say about every token [T], by name."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


class PolicyLoss(Protocol):
    """Log-probs under the policy and under the one before the update, advantages, all [T], to a loss."""

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
    ) -> TokenLoss:
        """The loss of every token; its gradient flows into `log_probs` alone."""
        ...


def probability_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """pi(token) / pi_old(token) [T]; at most exp(20)."""
    return (log_probs - old_log_probs).clamp(max=_LARGEST_LOG_RATIO).exp()


def clip(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """The clipped surrogate: max(-A r, -A clamp(r, 1 - clip_low, 1 + clip_high)) with r = pi / pi_old.

    PPO (arXiv:1707.06347, equation 7); separate bounds as in DAPO (arXiv:2503.14476). There is no second bound for
    negative advantages (dual clip), so this is what the papers write. Metrics: the tokens whose gradient the upper
    and the lower bound cut off, as 0 or 1.
    """
    ratio = probability_ratio(log_probs, old_log_probs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    above = ((advantages > 0) & (ratio > 1 + clip_high)).float()
    below = ((advantages < 0) & (ratio < 1 - clip_low)).float()
    return TokenLoss(
        torch.maximum(unclipped, clipped),
        {
            "policy/clip_fraction": above + below,
            "policy/clip_fraction_high": above,
            "policy/clip_fraction_low": below,
        },
    )


POLICY_LOSSES: Mapping[str, PolicyLoss] = {"clip": clip}
