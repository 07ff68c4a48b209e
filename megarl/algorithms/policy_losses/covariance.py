"""Selection by covariance of the tokens whose updates would reduce entropy the most (arXiv:2505.22617).

A selection looks at all trained tokens of an optimizer step, so it is made once, before the batch is split into
micro-batches and ranks. verl selects per micro-batch, and draws without a seed.
"""

import torch
from torch import Tensor

from megarl.algorithms.parts import Positive, Share
from megarl.algorithms.policy_losses.ratios import bounded_exp


def covariances(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """(log pi - mean log pi) (A - mean A) of every token, float64[T]: its term of their covariance (equation 10)."""
    log_probs, advantages = log_probs.detach().double(), advantages.double()
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def select_clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    generator: torch.Generator,
    *,
    clip_low: Share = 0.2,
    clip_high: Positive = 0.2,
    covariance_fraction: Share = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> Tensor:
    """Select at random among tokens with covariance_low < covariance < covariance_high: Clip-Cov's bool[T].

    Selects covariance_fraction of all T tokens (arXiv:2505.22617, equation 11), at least one, as far as that many
    qualify. Tokens whose ratio is already clipped do not qualify.
    """
    values = covariances(log_probs, advantages)
    ratio = bounded_exp(log_probs - old_log_probs)
    cut_off = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    candidates = ((values > covariance_low) & (values < covariance_high) & ~cut_off).nonzero().squeeze(1)
    order = torch.randperm(len(candidates), generator=generator).to(candidates.device)
    return _marked(candidates[order[: _count(covariance_fraction, values)]], values)


def select_kl_cov(log_probs: Tensor, advantages: Tensor, *, covariance_fraction: Share = 2e-4) -> Tensor:
    """Select the covariance_fraction of the tokens with the largest covariance: bool[T], at least one.

    KL-Cov (arXiv:2505.22617, equation 13). Ties go to the first tokens; nothing is random.
    """
    values = covariances(log_probs, advantages)
    order = values.argsort(descending=True, stable=True)
    return _marked(order[: _count(covariance_fraction, values)], values)


def _count(fraction: float, values: Tensor) -> int:
    return max(int(fraction * len(values)), 1)


def _marked(indices: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(len(values), dtype=torch.bool, device=values.device).index_fill(0, indices, True)
