"""Quotients of a GPU's kernel: a product and one step of Newton's give the code of every weight over every scale.

Neither a CPU nor Triton's interpreter has the fused multiply-add of a GPU, so it is made here, from float64.
"""

import numpy as np
import torch

from converters.fp8.blocks import LARGEST_CODE, SMALLEST_MAGNITUDE

MANTISSAS = np.arange(128, 256, dtype=np.float32)
"""All of bfloat16, as whole numbers: a power of two changes no mantissa of a quotient."""


def fused(a, b, c):
    """`a * b + c`, rounded once to float32.

    The product is exact in float64. So that the sum is not rounded twice, it is rounded to odd first (Boldo and
    Melquiond, Emulation of FMA and correctly rounded sums, 2008).
    """
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    of_c = total - product
    lost = (product - (total - of_c)) + (c - of_c)
    bits = total.view(np.int64)
    away = np.where((lost > 0) == (total > 0), 1, -1)
    odd = np.where((lost != 0) & (bits & 1 == 0), bits + away, bits)
    return odd.view(np.float64).astype(np.float32)


def codes(quotients):
    return torch.from_numpy(quotients).to(torch.float8_e4m3fn).view(torch.uint8)


def wrong_codes(*, steps):
    """How many codes are not those of the quotient, of all weights down to those whose code is zero."""
    wrong = 0
    magnitudes = (MANTISSAS[:, None] * np.float32(2.0) ** -np.arange(20, dtype=np.float32)).ravel()
    for largest in (*MANTISSAS, np.float32(SMALLEST_MAGNITUDE) * np.float32(2.0**40)):
        weights = magnitudes[magnitudes <= largest]
        weights = np.concatenate([weights, -weights])
        divisor = np.full_like(weights, largest / np.float32(LARGEST_CODE))
        inverse = np.float32(1.0) / divisor
        estimate = weights * inverse
        for _ in range(steps):
            estimate = fused(fused(-estimate, divisor, weights), inverse, estimate)
        wrong += int((codes(estimate) != codes(weights / divisor)).sum())
    return wrong


def test_one_step_is_enough_for_every_bfloat16_and_every_scale():
    assert wrong_codes(steps=1) == 0


def test_the_product_alone_is_not():
    assert wrong_codes(steps=0) > 0
