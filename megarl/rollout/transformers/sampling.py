"""Sampling from logits: what is kept of the distribution, and a token of it for a random number."""

import torch
from torch import Tensor

from megarl.rollout.protocol import SamplingParameters


def kept_log_probs(logits: Tensor, sampling: SamplingParameters) -> Tensor:
    """Log-probabilities [rows, vocabulary] of the distribution that is sampled from; -inf for tokens that are not kept.

    First the temperature, then the `top_k` most likely tokens and those that are as likely as the last of them, then,
    of what these are together, the fewest with at least the share `top_p`. Greedy sampling keeps all at temperature 1.
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
    """The token [rows] whose part of the interval from 0 to 1 each of the `numbers` (float64 [rows], below 1) is in."""
    ends = log_probs.double().exp().cumsum(-1)
    totals = ends[:, -1:]
    # Rounding may put the product at the total, which no token is beyond.
    points = torch.minimum(numbers[:, None] * totals, totals.nextafter(torch.zeros_like(totals)))
    return torch.searchsorted(ends, points, right=True)[:, 0]
