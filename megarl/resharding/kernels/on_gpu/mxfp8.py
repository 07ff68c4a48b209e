"""MXFP8 on a GPU: a program quantises a square, in which every 32 elements of a row share a scale.

The rule is that of `converters.number_formats.mxfp8`.
"""

import triton
import triton.language as tl

from megarl.resharding.kernels.on_gpu.numbers import e4m3, float32_bits, signed
from megarl.resharding.kernels.on_gpu.tiles import (
    COLUMNS,
    OFFSET_BYTES,
    PACKED,
    ROWS,
    SCALES,
    SCALES_OFFSET_BYTES,
    SLAB,
    SQUARE,
    slab_of,
    sum_of,
)

_SHARED = tl.constexpr(32)
_ACROSS = tl.constexpr(4)
"""Scales per row of a square."""
_NOT_FINITE = tl.constexpr(255)
_LARGEST_EXPONENT = tl.constexpr(8)
_LARGEST_CODE = tl.constexpr(448.0)


@triton.jit
def quantise(row, tile, LOCAL: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    """Quantise a square; returns its part of the checksum, and not zero if a weight cannot be quantised."""
    total = tl.full((), 0, tl.int64)
    largest = tl.full((), 0, tl.int32)
    for slab in range(0, SQUARE, SLAB):
        local, at, inside = slab_of(row, tile, slab, LOCAL)
        bits = float32_bits(tl.load(local, mask=inside, other=0.0))
        exponents = tl.max(tl.reshape(bits & 0x7FFFFFFF, (SLAB, _ACROSS, _SHARED)), axis=2) >> 23
        largest = tl.maximum(largest, tl.max(exponents))
        scales = tl.maximum(exponents - _LARGEST_EXPONENT, 0)
        places, there = _scales_of(row, tile, slab)
        stored = scales.to(tl.int8)
        tl.store(tl.load(row + SCALES).to(tl.pointer_type(tl.int8)) + places, stored, mask=there)
        codes = signed(e4m3(_scaled(bits, scales)), bits)
        tl.store(tl.load(row + PACKED).to(tl.pointer_type(tl.int8)) + at, codes, mask=inside)
        total += sum_of(tl.where(inside, codes, 0), tl.load(row + OFFSET_BYTES) + at.to(tl.int64), 1, WITH_CHECKSUM)
        offset = tl.load(row + SCALES_OFFSET_BYTES) + places.to(tl.int64)
        total += sum_of(tl.where(there, stored, 0), offset, 1, WITH_CHECKSUM)
    return total, (largest == _NOT_FINITE).to(tl.int32)


@triton.jit
def _scales_of(row, tile, slab):
    """The positions of the scales of some rows of a square, and a mask."""
    columns = tl.load(row + COLUMNS).to(tl.int32)
    across = (columns + SQUARE - 1) // SQUARE
    x = (tile // across) * SQUARE + slab + tl.arange(0, SLAB)[:, None]
    y = (tile % across) * _ACROSS + tl.arange(0, _ACROSS)[None, :]
    return x * (columns // _SHARED) + y, (x < tl.load(row + ROWS).to(tl.int32)) & (y < columns // _SHARED)


@triton.jit
def _scaled(bits, scales):
    """Divide magnitudes by their scales, which are biased exponents: exact, and at most 448."""
    inverse = ((254 - scales) << 23).to(tl.float32, bitcast=True)
    return tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) * _spread(inverse), _LARGEST_CODE)


@triton.jit
def _spread(values):
    """Broadcast one number per block to all elements of a slab."""
    wide = tl.broadcast_to(tl.reshape(values, (SLAB, _ACROSS, 1)), (SLAB, _ACROSS, _SHARED))
    return tl.reshape(wide, (SLAB, SQUARE))
