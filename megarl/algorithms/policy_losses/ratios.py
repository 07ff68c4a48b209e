"""Log-ratios of two policies, one per token."""

import math

import torch
from torch import Tensor

from megarl.algorithms.kl import LARGEST_LOG_RATIO
from megarl.algorithms.metrics import BinCounts
from megarl.algorithms.ragged import Ragged

_LOG_RATIOS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
RATIO_EDGES = tuple(math.exp(x) for x in (*(-x for x in reversed(_LOG_RATIOS)), *_LOG_RATIOS))
"""Symmetric around 1 in log space, and finer towards 1: most ratios of a healthy step lie within 0.01 of it."""


def probability_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """pi(token) / pi_old(token) [T]; at most exp(20)."""
    return bounded_exp(log_probs - old_log_probs)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), clamped to at most exp(20), above which the gradient is 0."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def of_token(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log(pi / pi_old) of every token [T]: PPO (arXiv:1707.06347, equation 6)."""
    return log_probs - old_log_probs


def of_response(log_probs: Tensor, old_log_probs: Tensor, responses: Ragged) -> Tensor:
    """Mean log-ratio of the response at each of its tokens [T], with the gradient of the token's own log-prob.

    log s_it = sg[mean_t log(pi / pi_old)] + log pi - sg[log pi]: GSPO's token-level form (arXiv:2507.18071, equation
    14), which allows advantages that differ within a response. If they do not, value and gradient of the loss are those
    of its equation 5.
    """
    # float64 keeps the precision of sums over thousands of tokens.
    mean = responses.mean((log_probs - old_log_probs).detach().double())
    return responses.spread(mean).to(log_probs.dtype) + (log_probs - log_probs.detach())


def of_response_to_reference(log_probs: Tensor, reference_log_probs: Tensor, responses: Ragged) -> Tensor:
    """log(pi(response) / pi_ref(response)) at each token of the response [T]: SPPO, SPIN, DPO."""
    difference = responses.sum((log_probs - reference_log_probs).double())
    return responses.spread(difference).to(log_probs.dtype)


def none(log_probs: Tensor) -> Tensor:
    """0: the policy is assumed to be the one that sampled."""
    return torch.zeros_like(log_probs)


def ratio_counts(log_ratios: Tensor) -> BinCounts:
    """Count the ratios exp(`log_ratios` [T]) in each bin of RATIO_EDGES, without gradient.

    Ratios beyond the outer edges count in the outer bins.
    """
    inner = torch.tensor(RATIO_EDGES[1:-1], dtype=torch.float64, device=log_ratios.device).log()
    places = torch.bucketize(log_ratios.detach().double(), inner, right=True)
    return BinCounts(RATIO_EDGES, torch.bincount(places, minlength=len(RATIO_EDGES) - 1).double())
