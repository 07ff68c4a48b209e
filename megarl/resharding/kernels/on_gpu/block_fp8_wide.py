"""Block FP8 on a GPU for contiguous, aligned bfloat16: each load reads four weights, each stored word holds four codes.

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
"""Rows that a program holds in registers at once."""
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_MAGNITUDES_OF_CODES = tl.constexpr(0x7F7F7F7F)
_UPPER_HALF = tl.constexpr(-(2**16))
_MAGNITUDE_OF_UPPER_HALF = tl.constexpr(0x7FFF0000)
_SIGN = tl.constexpr(-(2**31))
_SIGNS_OF_CODES = tl.constexpr(0x80808080 - 2**32)


@triton.jit
def quantise(row, tile, HAS_E4M3: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    """Quantise one block; returns its part of the checksum, and not zero if a weight cannot be quantised.

    The block is read twice, slab by slab: the second time it is in the cache, and using few registers lets many
    programs run at once. If the GPU `HAS_E4M3`, its own instruction rounds to codes.
    """
    columns = tl.multiple_of((tl.load(row + COLUMNS) >> 2).to(tl.int32), 2)
    rows = tl.load(row + ROWS).to(tl.int32)
    stride = tl.multiple_of(tl.load(row + ROW_STRIDE) >> 2, 2)
    across = (columns + _ACROSS - 1) // _ACROSS
    top = (tile // across) * SQUARE + tl.arange(0, _SLAB)[:, None]
    y = (tile % across) * _ACROSS + tl.arange(0, _ACROSS)[None, :]
    local = tl.multiple_of(tl.load(row + LOCAL_PLANE).to(tl.pointer_type(tl.int64)), 16)
    local += top.to(tl.int64) * stride + y
    packed = tl.multiple_of(tl.load(row + PACKED).to(tl.pointer_type(tl.int32)), 8) + (top * columns + y)

    greatest = tl.full((_SLAB, _ACROSS), 0, tl.int32)
    for slab in range(0, SQUARE, _SLAB):
        inside = (top + slab < rows) & (y < columns)
        low, high = _halves(tl.load(local + slab * stride, mask=inside, other=0))
        greatest = _greater(greatest, low, high, HAS_E4M3)
    largest = tl.max(tl.maximum(greatest & _MAGNITUDE_OF_UPPER_HALF, (greatest << 16) & _MAGNITUDE_OF_UPPER_HALF))
    scale, halved = scale_of(largest, tl.load(row + _POWER_OF_TWO))
    # Halve a power of two by decrementing its exponent.
    kept = scale - (halved << 23)
    tl.store(tl.load(row + SCALES).to(tl.pointer_type(tl.int32)) + tile, kept)

    divisor = scale.to(tl.float32, bitcast=True)
    # A bucket has fewer than 2^31 words, so multiplying by a position takes a 32 by 32 bit product.
    position = ((tl.load(row + OFFSET_BYTES) >> 2) + 1).to(tl.int32) + top * columns + y
    sums = tl.full((_SLAB, _ACROSS), 0, tl.int64)
    for slab in range(0, SQUARE, _SLAB):
        inside = (top + slab < rows) & (y < columns)
        low, high = _halves(tl.load(local + slab * stride, mask=inside, other=0))
        codes = _codes(low, high, divisor, halved, HAS_E4M3)
        tl.store(packed + slab * columns, codes, mask=inside)
        if WITH_CHECKSUM:
            sums += codes.to(tl.int64) * (position + slab * columns).to(tl.int64)
    total = scale_sum(row, tile, kept, WITH_CHECKSUM) + tl.sum(sums)
    return total, (largest > bits_of(_LARGEST_WEIGHT)).to(tl.int32)


@triton.jit
def _halves(four):
    """Split four weights into the lower two and the upper two."""
    return four.to(tl.int32), (four >> 32).to(tl.int32)


@triton.jit
def _bits_of_four(low, high):
    """The bits of four bfloat16 weights as float32, of which bfloat16 is the upper half."""
    return low << 16, low & _UPPER_HALF, high << 16, high & _UPPER_HALF


@triton.jit
def _greater(greatest, low, high, HAS_E4M3: tl.constexpr):
    """The elementwise maximum magnitude of bfloat16 in both halves of a word; a NaN exceeds any number."""
    if HAS_E4M3:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 one, other;
            abs.bf16x2 one, $2;
            abs.bf16x2 other, $3;
            max.NaN.bf16x2 one, one, other;
            max.NaN.bf16x2 $0, $1, one;
            }""",
            "=r,r,r,r",
            [greatest, low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:  # Triton compiles what stands behind a return, too
        upper = tl.maximum(greatest & _MAGNITUDE, tl.maximum(low & _MAGNITUDE, high & _MAGNITUDE))
        lower = tl.maximum((low << 16) & _MAGNITUDE, (high << 16) & _MAGNITUDE)
        lower = tl.maximum((greatest << 16) & _MAGNITUDE, lower)
        return (upper & _UPPER_HALF) | (lower >> 16)


@triton.jit
def _codes(low, high, divisor, halved, HAS_E4M3: tl.constexpr):
    """The codes of four weights divided by `divisor`, packed in a word; of twice the weights if it is `halved`."""
    first, second, third, fourth = _bits_of_four(low, high)
    if HAS_E4M3:
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), divisor)
        codes = tl.inline_asm_elementwise(
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
        # Gather the upper bytes of four weights, which hold their signs.
        signs = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7531;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:  # Triton compiles what stands behind a return, too
        codes = _code(first, divisor) | (_code(second, divisor) << 8)
        codes |= (_code(third, divisor) << 16) | (_code(fourth, divisor) << 24)
        signs = ((first >> 24) & 0x80) | ((second >> 16) & 0x8000) | ((third >> 8) & 0x800000) | (fourth & _SIGN)
    codes &= _MAGNITUDES_OF_CODES
    if halved != 0:
        codes = _doubled(codes)
    return codes | (signs & _SIGNS_OF_CODES)


@triton.jit
def _quotient(bits, divisor, inverse):
    """Divide by `divisor`: a product with the inverse, off by at most two units, and one Newton step.

    The result rounds to the code of the exact quotient for every bfloat16 and every scale of a block (`test_quotients`
    tries all); the product alone does not.
    """
    number = bits.to(tl.float32, bitcast=True)
    divisors, inverses = divisor + tl.zeros_like(number), inverse + tl.zeros_like(number)
    estimate = number * inverses
    return tl.fma(tl.fma(-estimate, divisors, number), inverses, estimate)


@triton.jit
def _code(bits, divisor):
    """The code of the magnitude of a number, given by its bits, divided by `divisor`."""
    magnitude = (bits & _MAGNITUDE).to(tl.float32, bitcast=True)
    return e4m3(tl.div_rn(magnitude, divisor + tl.zeros_like(magnitude)))


@triton.jit
def _doubled(codes):
    """Double the numbers in words of unsigned codes: increment the exponent, or double the mantissa of a subnormal."""
    has_exponent = ((codes & 0x78787878) + 0x78787878) & _SIGNS_OF_CODES
    small = codes & 0x07070707 & ~(has_exponent - ((has_exponent >> 7) & 0x01010101))
    return codes + ((has_exponent >> 4) & 0x08080808) + small
