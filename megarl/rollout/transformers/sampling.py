"""Sampling from logits: the truncated distribution, and the token for a random number."""

import torch
from torch import Tensor

from megarl.rollout.protocol import SamplingParameters


def kept_log_probs(logits: Tensor, sampling: SamplingParameters) -> Tensor:
    """Log-probs [rows, vocabulary] of the distribution to sample from; -inf for tokens that are cut off.

    Applies the temperature, then keeps the `top_k` most likely tokens, including ties with the last one, then the
    fewest of these with at least the share `top_p` of their total. Greedy sampling keeps all tokens at temperature 1.
    """
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ascending, order = logits.sort(stable=True)
        is_dropped = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        is_dropped[:, -1] = False
        logits = logits.masked_fill(is_dropped.scatter(-1, order, is_dropped), -torch.inf)
    return logits.log_softmax(-1)


def tokens_at(log_probs: Tensor, numbers: Tensor) -> Tensor:
    """Sample by inverse CDF: the token [rows] whose part of [0, 1) contains each of `numbers` (float64 [rows])."""
    ends = log_probs.double().exp().cumsum(-1)
    totals = ends[:, -1:]
    # Rounding may put the product at the total, beyond the last token.
    points = torch.minimum(numbers[:, None] * totals, totals.nextafter(torch.zeros_like(totals)))
    return torch.searchsorted(ends, points, right=True)[:, 0]
