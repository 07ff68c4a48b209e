"""Block FP8 on a GPU: a program quantises one block by the rule of `converters.fp8`, in integer arithmetic on bits."""

import triton
import triton.language as tl

from converters.fp8.blocks import (
    HALVED_UP_TO,
    LARGEST_CODE,
    LARGEST_WEIGHT,
    SMALLEST_MAGNITUDE,
    SMALLEST_MAGNITUDE_OF_POWERS,
)
from megarl.resharding.kernels.launch_table import Column
from megarl.resharding.kernels.on_gpu.numbers import bits_of, e4m3, float32_bits, signed
from megarl.resharding.kernels.on_gpu.tiles import (
    OFFSET_BYTES,
    PACKED,
    SCALES,
    SCALES_OFFSET_BYTES,
    SLAB,
    SQUARE,
    slab_of,
    sum_of,
)

_POWER_OF_TWO = tl.constexpr(int(Column.POWER_OF_TWO))
_SMALLEST_MAGNITUDE = tl.constexpr(SMALLEST_MAGNITUDE)
_SMALLEST_MAGNITUDE_OF_POWERS = tl.constexpr(SMALLEST_MAGNITUDE_OF_POWERS)
_LARGEST_WEIGHT = tl.constexpr(LARGEST_WEIGHT)
_HALVED_UP_TO = tl.constexpr(HALVED_UP_TO)
_LARGEST_CODE = tl.constexpr(LARGEST_CODE)


@triton.jit
def quantise(row, tile, LOCAL: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    """Quantise one block; returns its part of the checksum, and not zero if a weight cannot be quantised.

    The block does not fit into registers, so it is read twice, slab by slab; the second time it is in the cache.
    """
    largest = tl.full((), 0, tl.int32)
    for slab in range(0, SQUARE, SLAB):
        local, _at, inside = slab_of(row, tile, slab, LOCAL)
        largest = tl.maximum(largest, tl.max(float32_bits(tl.load(local, mask=inside, other=0.0)) & 0x7FFFFFFF))
    scale, halved = scale_of(largest, tl.load(row + _POWER_OF_TWO))
    # Halve a power of two by decrementing its exponent.
    kept = scale - (halved << 23)
    tl.store(tl.load(row + SCALES).to(tl.pointer_type(tl.int32)) + tile, kept)
    total = scale_sum(row, tile, kept, WITH_CHECKSUM)
    for slab in range(0, SQUARE, SLAB):
        local, at, inside = slab_of(row, tile, slab, LOCAL)
        codes = _encode(float32_bits(tl.load(local, mask=inside, other=0.0)), scale, halved)
        tl.store(tl.load(row + PACKED).to(tl.pointer_type(tl.int8)) + at, codes, mask=inside)
        total += sum_of(codes, tl.load(row + OFFSET_BYTES) + at.to(tl.int64), 1, WITH_CHECKSUM)
    return total, (largest > bits_of(_LARGEST_WEIGHT)).to(tl.int32)


@triton.jit
def scale_of(largest, power_of_two):
    """Return the bits of a block's scale, from those of its largest magnitude, and whether (0 or 1) it is halved."""
    smallest = tl.where(power_of_two != 0, bits_of(_SMALLEST_MAGNITUDE_OF_POWERS), bits_of(_SMALLEST_MAGNITUDE))
    magnitude = tl.maximum(largest, smallest).to(tl.float32, bitcast=True)
    scale = tl.div_rn(magnitude, tl.full((), _LARGEST_CODE, tl.float32)).to(tl.int32, bitcast=True)
    # Round up to a power of two: a nonzero mantissa carries into the exponent.
    scale = tl.where(power_of_two != 0, (scale + 0x7FFFFF) & 0x7F800000, scale)
    halved = (power_of_two != 0) & (magnitude <= _HALVED_UP_TO * scale.to(tl.float32, bitcast=True))
    return scale, halved.to(tl.int32)


@triton.jit
def _encode(bits, scale, halved):
    """The e4m3 codes of numbers divided by a scale, all given as bits of float32.

    If the scale is `halved`, they are the codes of twice the numbers.
    """
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    codes = e4m3(tl.div_rn(magnitude, scale.to(tl.float32, bitcast=True) + tl.zeros_like(magnitude)))
    codes = tl.where(halved != 0, tl.where(codes < 8, codes * 2, codes + 8), codes)
    return signed(codes, bits)


@triton.jit
def scale_sum(row, tile, scale, WITH_CHECKSUM: tl.constexpr):
    """The contribution of a block's scale, given by its bits, to the checksum."""
    total = tl.full((), 0, tl.int64)
    if WITH_CHECKSUM:
        total = scale.to(tl.int64) * ((tl.load(row + SCALES_OFFSET_BYTES) >> 2) + tile + 1)
    return total
