"""Advantages of a whole batch brought to mean 0 and variance 1 over its tokens."""

import torch
from torch import Tensor

from megarl.algorithms.ragged import Ragged

# Added to the variance; verl's value.
_VARIANCE_EPSILON = 1e-8
# Tokens that are summed in their own precision, before the sums are summed in float64: few enough to lose nothing and
# to stay in the cache.
_PIECE = 1 << 16


def whiten_(values: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens [T], unbiased variance (n - 1), in place.

    A single token has no variance; it becomes 0.
    """
    count = len(values)
    # First less one of them: what is equal is then exactly 0, whatever the rounding of its mean.
    values.sub_(values[0].clone())
    mean = sum(float(piece.sum()) for piece in values.split(_PIECE)) / count
    values.sub_(mean)
    squares = sum(float(piece.dot(piece)) for piece in values.split(_PIECE))
    return values.mul_((squares / max(count - 1, 1) + _VARIANCE_EPSILON) ** -0.5)


def whitened_by_token(values: Tensor, responses: Ragged) -> Tensor:
    """`whiten_` of what is the same at every token of a response, from one value per response: float64[N] to [N]."""
    lengths = responses.lengths.double()
    centred = values - lengths.dot(values) / responses.tokens
    variance = lengths.dot(centred.square()) / max(responses.tokens - 1, 1)
    return centred * torch.rsqrt(variance + _VARIANCE_EPSILON)
