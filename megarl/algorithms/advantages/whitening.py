"""Whitening: mean 0 and variance 1 over the tokens of a batch; and the estimators that are defined by it."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from megarl.algorithms.advantages.group_rewards import standardised
from megarl.algorithms.advantages.groups import Groups
from megarl.algorithms.ragged import Ragged

# Added to the variance; verl's value.
_VARIANCE_EPSILON = 1e-8
# Tokens converted to float64 at a time: few enough to stay in the cache.
_PIECE = 1 << 16


def whiten_(values: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens [T], unbiased variance (n - 1), in place.

    A single token becomes 0.
    """
    # Subtract one of the values first: values that are all equal become exactly 0, however their mean would round.
    values.sub_(values[0].clone())
    total, squares = 0.0, 0.0
    for piece in values.split(_PIECE):
        exact = piece.double()
        total += float(exact.sum())
        squares += float(exact.dot(exact))
    mean = total / len(values)
    variance = max(squares - total * mean, 0.0) / max(len(values) - 1, 1)
    return values.sub_(mean).mul_((variance + _VARIANCE_EPSILON) ** -0.5)


def whitened_by_token(values: Tensor, responses: Ragged) -> Tensor:
    """Whiten over the tokens, given one value per response for all of its tokens: float64[N] to [N]."""
    lengths = responses.lengths.double()
    centred = values - lengths.dot(values) / responses.tokens
    variance = lengths.dot(centred.square()) / max(responses.tokens - 1, 1)
    return centred * torch.rsqrt(variance + _VARIANCE_EPSILON)


def reinforce_plus_plus_baseline(scores: Tensor, prompts: Groups, responses: Ragged) -> Tensor:
    """Scores minus their group's mean, whitened over the tokens of the batch.

    A_i = (r_i - mean_g - m) / sqrt(v + 1e-8), m and v mean and variance of r_i - mean_g over all trained tokens
    (REINFORCE++ with baseline, arXiv:2501.03262, section 3.2).
    """
    return whitened_by_token(prompts.centred(scores), responses)


def gdpo(
    parts: Mapping[str, Tensor],
    prompts: Groups,
    responses: Ragged,
    part_weights: Mapping[str, float] = MappingProxyType({}),
    penalties: Tensor | None = None,
    *,
    normalize_by_std: bool = True,
) -> Tensor:
    """Several named rewards, each normalized within its group separately, so that none drowns the others.

    A_i = whiten(sum_k w_k (r_ik - mean_gk) / (std_gk + 1e-6) + q_i - mean_gq) over the named rewards k with the weights
    w, whitened over the tokens of the batch; without `normalize_by_std` not divided by std (GDPO, arXiv:2601.05242).

    `parts` are already weighted, and normalization would cancel a weight: it is divided out before and multiplied in
    after. The penalty q of long responses is only centered. Divided by its standard deviation, its factor would cancel
    too, and a single token too many would count in full. Per-token rewards belong to no part and do not enter.

    verl whitens over tokens, too; the paper whitens over responses, where a long one weighs no more than a short one.
    """
    total = torch.zeros_like(prompts.index, dtype=torch.float64)
    for name, part in parts.items():
        weight = part_weights.get(name, 1.0)
        if weight:
            bare = part.double() / weight
            total += weight * standardised(bare, prompts, normalize_by_std=normalize_by_std)
    if penalties is not None:
        total += prompts.centred(penalties.double())
    return whitened_by_token(total, responses)
