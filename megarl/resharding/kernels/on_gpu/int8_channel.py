"""INT8 per channel on a GPU: a program quantises some whole rows, each of which has a scale.

The rule is that of `converters.number_formats.int8_channel`.
"""

import triton
import triton.language as tl

from converters.number_formats.int8_channel import LARGEST_CODE, LARGEST_WEIGHT, SMALLEST_MAGNITUDE
from megarl.resharding.kernels.on_gpu.numbers import bits_of, float32_bits
from megarl.resharding.kernels.on_gpu.tiles import (
    COLUMNS,
    LOCAL_PLANE,
    OFFSET_BYTES,
    PACKED,
    ROWS,
    SCALES,
    SCALES_OFFSET_BYTES,
    SLAB,
    SQUARE,
    steps,
    sum_of,
)

_LARGEST_CODE = tl.constexpr(LARGEST_CODE)
_LARGEST_WEIGHT = tl.constexpr(LARGEST_WEIGHT)
_SMALLEST_MAGNITUDE = tl.constexpr(SMALLEST_MAGNITUDE)
# At this magnitude the spacing of float32 is 1, so adding it rounds a number to an integer, ties to even.
_ROUNDING = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def quantise(row, tile, LOCAL: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    """Quantise a slab of rows; returns its part of the checksum, and not zero if a weight cannot be quantised.

    Rows are read twice; the second time they are in the cache.
    """
    columns = tl.load(row + COLUMNS).to(tl.int32)
    largest = tl.full((SLAB, 1), 0, tl.int32)
    for left in range(0, columns, SQUARE):
        local, _at, inside = _part(row, tile, left, LOCAL)
        magnitudes = float32_bits(tl.load(local, mask=inside, other=0.0)) & 0x7FFFFFFF
        largest = tl.maximum(largest, tl.max(magnitudes, axis=1)[:, None])
    magnitude = tl.maximum(largest, bits_of(_SMALLEST_MAGNITUDE)).to(tl.float32, bitcast=True)
    scales = tl.div_rn(magnitude, tl.full((SLAB, 1), _LARGEST_CODE, tl.float32))
    places, there = _rows_of(row, tile)
    kept = scales.to(tl.int32, bitcast=True)
    tl.store(tl.load(row + SCALES).to(tl.pointer_type(tl.int32)) + places, kept, mask=there)
    total = _scales_sum(row, places, tl.where(there, kept, 0), WITH_CHECKSUM)
    for left in range(0, columns, SQUARE):
        local, at, inside = _part(row, tile, left, LOCAL)
        values = float32_bits(tl.load(local, mask=inside, other=0.0)).to(tl.float32, bitcast=True)
        quotients = tl.div_rn(values, scales + tl.zeros_like(values))
        codes = ((quotients + _ROUNDING).to(tl.int32, bitcast=True) - bits_of(_ROUNDING)).to(tl.int8)
        tl.store(tl.load(row + PACKED).to(tl.pointer_type(tl.int8)) + at, codes, mask=inside)
        total += sum_of(tl.where(inside, codes, 0), tl.load(row + OFFSET_BYTES) + at.to(tl.int64), 1, WITH_CHECKSUM)
    return total, (tl.max(largest) > bits_of(_LARGEST_WEIGHT)).to(tl.int32)


@triton.jit
def _part(row, tile, left, LOCAL: tl.constexpr):
    """Some columns of a slab: their addresses in the local plane, their positions in the bucket, and a mask."""
    columns = tl.load(row + COLUMNS).to(tl.int32)
    x = tile * SLAB + tl.arange(0, SLAB)[:, None]
    y = left + tl.arange(0, SQUARE)[None, :]
    inside = (x < tl.load(row + ROWS).to(tl.int32)) & (y < columns)
    return tl.load(row + LOCAL_PLANE).to(tl.pointer_type(LOCAL)) + steps(row, x, y), x * columns + y, inside


@triton.jit
def _rows_of(row, tile):
    """The indices of a slab's rows, and a mask."""
    x = tile * SLAB + tl.arange(0, SLAB)[:, None]
    return x, x < tl.load(row + ROWS).to(tl.int32)


@triton.jit
def _scales_sum(row, places, kept, WITH_CHECKSUM: tl.constexpr):
    return sum_of(kept, tl.load(row + SCALES_OFFSET_BYTES) + 4 * places.to(tl.int64), 4, WITH_CHECKSUM)
