"""Advantages of a whole batch brought to mean 0 and variance 1 over its tokens."""

import torch
from torch import Tensor

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
