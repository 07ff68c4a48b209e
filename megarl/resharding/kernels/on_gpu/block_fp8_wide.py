"""Block FP8 on a GPU for bfloat16 that lies side by side and aligned: four weights are a load, four codes a word.

The rule is that of `block_fp8`.
"""

import triton
import triton.language as tl

from converters.fp8.blocks import BLOCK, LARGEST_WEIGHT
from megarl.resharding.kernels.launch_table import Column
from megarl.resharding.kernels.on_gpu.block_fp8 import scale_of, scale_sum
from megarl.resharding.kernels.on_gpu.numbers import bits_of, e4m3
from megarl.resharding.kernels.on_gpu.tiles import (
    COLUMNS,
    LOCAL_PLANE,
    OFFSET_BYTES,
    PACKED,
    ROW_STRIDE,
    ROWS,
    SCALES,
    SQUARE,
)

_POWER_OF_TWO = tl.constexpr(int(Column.POWER_OF_TWO))
_LARGEST_WEIGHT = tl.constexpr(LARGEST_WEIGHT)
_ACROSS = tl.constexpr(BLOCK // 4)
"""Words in a row of a block."""
_SLAB = tl.constexpr(32)
"""Rows that a program has in its registers at once."""
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_MAGNITUDES_OF_CODES = tl.constexpr(0x7F7F7F7F)
_UPPER_HALF = tl.constexpr(-(2**16))
_SIGN = tl.constexpr(-(2**31))
_SIGNS_OF_CODES = tl.constexpr(0x80808080 - 2**32)


@triton.jit
def quantise(row, tile, HAS_E4M3: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    """Quantise one block; returns its part of the checksum, and not zero if a weight cannot be quantised.

    It is read twice, slab by slab: the second time it lies in the cache, and few registers let many programs run at
    once. Where the GPU `HAS_E4M3`, it rounds to codes itself.
    """
    greatest = tl.full((_SLAB, _ACROSS), 0, tl.int32)
    for slab in range(0, SQUARE, _SLAB):
        local, _packed, _at, inside = _places(row, tile, slab)
        first, second, third, fourth = _bits_of_four(tl.load(local, mask=inside, other=0))
        one = tl.maximum(first & _MAGNITUDE, second & _MAGNITUDE)
        other = tl.maximum(third & _MAGNITUDE, fourth & _MAGNITUDE)
        greatest = tl.maximum(greatest, tl.maximum(one, other))
    largest = tl.max(greatest)
    scale, halved = scale_of(largest, tl.load(row + _POWER_OF_TWO))
    # A power of two is halved in its exponent.
    kept = scale - (halved << 23)
    tl.store(tl.load(row + SCALES).to(tl.pointer_type(tl.int32)) + tile, kept)
    divisor = scale.to(tl.float32, bitcast=True)
    sums = tl.full((_SLAB, _ACROSS), 0, tl.int64)
    for slab in range(0, SQUARE, _SLAB):
        local, packed, at, inside = _places(row, tile, slab)
        first, second, third, fourth = _bits_of_four(tl.load(local, mask=inside, other=0))
        codes = _codes(first, second, third, fourth, divisor, HAS_E4M3) & _MAGNITUDES_OF_CODES
        if halved != 0:
            codes = _doubled(codes)
        codes |= ((first >> 24) & 0x80) | ((second >> 16) & 0x8000) | ((third >> 8) & 0x800000) | (fourth & _SIGN)
        tl.store(packed, codes, mask=inside)
        sums += _parts_of_sum(row, codes, at, WITH_CHECKSUM)
    total = scale_sum(row, tile, kept, WITH_CHECKSUM) + tl.sum(sums)
    return total, (largest > bits_of(_LARGEST_WEIGHT)).to(tl.int32)


@triton.jit
def _places(row, tile, slab):
    """Where the fours of some rows' weights and the words of their codes are, the words' numbers, and which exist."""
    columns = tl.multiple_of((tl.load(row + COLUMNS) >> 2).to(tl.int32), 2)
    across = (columns + _ACROSS - 1) // _ACROSS
    x = (tile // across) * SQUARE + slab + tl.arange(0, _SLAB)[:, None]
    y = (tile % across) * _ACROSS + tl.arange(0, _ACROSS)[None, :]
    inside = (x < tl.load(row + ROWS).to(tl.int32)) & (y < columns)
    stride = tl.multiple_of(tl.load(row + ROW_STRIDE) >> 2, 2)
    local = tl.multiple_of(tl.load(row + LOCAL_PLANE).to(tl.pointer_type(tl.int64)), 16) + (x.to(tl.int64) * stride + y)
    at = x * columns + y
    packed = tl.multiple_of(tl.load(row + PACKED).to(tl.pointer_type(tl.int32)), 8) + at
    return local, packed, at, inside


@triton.jit
def _bits_of_four(four):
    """The bits, as float32, of four weights: those of bfloat16 are the upper half."""
    low, high = four.to(tl.int32), (four >> 32).to(tl.int32)
    return low << 16, low & _UPPER_HALF, high << 16, high & _UPPER_HALF


@triton.jit
def _codes(first, second, third, fourth, divisor, HAS_E4M3: tl.constexpr):
    """Words of the codes of four numbers over a divisor."""
    if HAS_E4M3:
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), divisor)
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [
                _quotient(first, divisor, inverse),
                _quotient(second, divisor, inverse),
                _quotient(third, divisor, inverse),
                _quotient(fourth, divisor, inverse),
            ],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:  # Triton compiles what stands behind a return, too
        one = _code(first, divisor) | (_code(second, divisor) << 8)
        return one | (_code(third, divisor) << 16) | (_code(fourth, divisor) << 24)


@triton.jit
def _quotient(bits, divisor, inverse):
    """A number over a divisor, rounded once: two steps of Newton's from a product that is off by two units at most.

    Markstein, IA-64 and Elementary Functions, theorem 8.2: the last step rounds rightly, as `inverse` is the nearest.
    """
    number = bits.to(tl.float32, bitcast=True)
    divisors, inverses = divisor + tl.zeros_like(number), inverse + tl.zeros_like(number)
    estimate = number * inverses
    estimate = tl.fma(tl.fma(-estimate, divisors, number), inverses, estimate)
    return tl.fma(tl.fma(-estimate, divisors, number), inverses, estimate)


@triton.jit
def _code(bits, divisor):
    """The code of the magnitude of a number over a divisor, by its bits."""
    magnitude = (bits & _MAGNITUDE).to(tl.float32, bitcast=True)
    return e4m3(tl.div_rn(magnitude, divisor + tl.zeros_like(magnitude)))


@triton.jit
def _doubled(codes):
    """Words of codes without signs, of twice the numbers: the next exponent, or twice the mantissa without one."""
    has_exponent = ((codes & 0x78787878) + 0x78787878) & _SIGNS_OF_CODES
    small = codes & 0x07070707 & ~(has_exponent - ((has_exponent >> 7) & 0x01010101))
    return codes + ((has_exponent >> 4) & 0x08080808) + small


@triton.jit
def _parts_of_sum(row, words, at, WITH_CHECKSUM: tl.constexpr):
    """The number that each word adds to the checksum."""
    parts = tl.zeros_like(words).to(tl.int64)
    if WITH_CHECKSUM:
        # A bucket has fewer than 2^31 words: the product is one of 32 bits by 32.
        position = ((tl.load(row + OFFSET_BYTES) >> 2) + 1).to(tl.int32) + at
        parts = words.to(tl.int64) * position.to(tl.int64)
    return parts
