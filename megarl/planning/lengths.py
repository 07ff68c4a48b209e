"""Lengths of responses: the maximum-entropy distribution with a given mean, up to a longest length.

It is an exponential distribution truncated at the longest length, which is 1 here.
"""

import math


def exponential_rate(mean: float) -> float:
    """Rate of the distribution with a mean in (0, 1); negative for means above one half."""
    mean = min(mean, 0.997)
    # A short mean is almost the inverse of the rate.
    low, high = -500.0, max(500.0, 2 / mean)
    for _ in range(60):
        middle = (low + high) / 2
        if _mean(middle) > mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def longer_than(length: float, rate: float) -> float:
    """Share of responses longer than `length`."""
    if abs(rate) < 1e-6:
        return 1 - length
    return (math.exp(-rate * length) - math.exp(-rate)) / -math.expm1(-rate)


def mean_square(rate: float) -> float:
    """Mean of the squared lengths."""
    return 1 / 3 - rate / 12 if abs(rate) < 1e-3 else 2 * _mean(rate) / rate - _beyond(rate)


def mean_so_far(rate: float) -> float:
    """Mean length of a response at one of its tokens, as far as it is: long ones have more of the tokens."""
    return mean_square(rate) / (2 * _mean(rate))


def _mean(rate: float) -> float:
    return 0.5 - rate / 12 if abs(rate) < 1e-4 else 1 / rate - _beyond(rate)


def _beyond(rate: float) -> float:
    """Part of the mean of the exponential distribution that truncation at the longest length takes off."""
    return 1 / math.expm1(rate) if rate < 700 else 0.0
