"""Advantages of a whole batch brought to mean 0 and variance 1 over its tokens, and the estimators defined by that."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from megarl.algorithms.advantages.group_rewards import standardised
from megarl.algorithms.advantages.groups import Groups
from megarl.algorithms.ragged import Ragged

# Added to the variance; verl's value.
_VARIANCE_EPSILON = 1e-8
# Tokens that are brought to float64 at a time: few enough to stay in the cache.
_PIECE = 1 << 16


def whiten_(values: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens [T], unbiased variance (n - 1), in place.

    A single token has no variance; it becomes 0.
    """
    # First less one of them: what is equal is then exactly 0, whatever the rounding of its mean.
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
    """`whiten_` of what is the same at every token of a response, from one value per response: float64[N] to [N]."""
    lengths = responses.lengths.double()
    centred = values - lengths.dot(values) / responses.tokens
    variance = lengths.dot(centred.square()) / max(responses.tokens - 1, 1)
    return centred * torch.rsqrt(variance + _VARIANCE_EPSILON)


def reinforce_plus_plus_baseline(scores: Tensor, prompts: Groups, responses: Ragged) -> Tensor:
    """Scores less their group's mean, whitened over the tokens of the batch.

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
    """Several rewards, each normalised within its group by itself, so that none drowns the others.

    A_i = whiten(sum_k w_k (r_ik - mean_gk) / (std_gk + 1e-6) + q_i - mean_gq) over the named rewards k with the weights
    w, whitened over the tokens of the batch; without `normalize_by_std` not divided (GDPO, arXiv:2601.05242). The
    normalisation would divide a weight out, so it is taken out of the part before and put in after. A penalty q of long
    responses is no reward of its own: divided by its deviation it would count the same whatever its factor, and in full
    for one token too many; it is centred alone. Rewards of single tokens belong to no part and change nothing.

    The whitening over tokens is verl's; the paper's is over responses, where long ones weigh no more than short ones.
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
