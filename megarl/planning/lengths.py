"""Lengths of responses: of all distributions up to a longest with a mean, the one that assumes least else.

It is exponential, cut at the longest, which is 1 here.
"""

import math


def exponential_rate(mean: float) -> float:
    """Rate of the distribution with a mean in (0, 1); negative for a mean above a half."""
    low, high = -500.0, 500.0
    mean = min(max(mean, 0.003), 0.997)
    for _ in range(60):
        middle = (low + high) / 2
        if _mean(middle) > mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def longer_than(length: float, rate: float) -> float:
    """The share of responses that are longer than `length`."""
    if abs(rate) < 1e-6:
        return 1 - length
    return (math.exp(-rate * length) - math.exp(-rate)) / -math.expm1(-rate)


def mean_square(rate: float) -> float:
    """Mean of the squares of the lengths."""
    return 1 / 3 - rate / 12 if abs(rate) < 1e-3 else 2 * _mean(rate) / rate - 1 / math.expm1(rate)


def _mean(rate: float) -> float:
    return 0.5 - rate / 12 if abs(rate) < 1e-4 else 1 / rate - 1 / math.expm1(rate)
