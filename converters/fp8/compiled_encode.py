"""Computes codes and scales of block FP8 in machine code, from a block's weights and their largest magnitude.

The arithmetic works on bits, as in the GPU kernel (`megarl/resharding/kernels/on_gpu/block_fp8.py`). A bfloat16 has a
mantissa of 7 bits, and a step of its exponent changes a code by a constant. So if the processor has a byte lookup
instruction, the codes of all mantissas are computed once per block, and each weight's code is looked up.
"""

import struct
from typing import NamedTuple

from llvmlite import ir

from converters.fp8.blocks import (
    HALVED_UP_TO,
    LARGEST_CODE,
    LARGEST_WEIGHT,
    SMALLEST_MAGNITUDE,
    SMALLEST_MAGNITUDE_OF_POWERS,
)
from converters.machine_code import BITS_8, BITS_16, BITS_32, BITS_64, FLOAT32, Builder, constant, vector

LOOKED_UP = 64
"""Weights whose codes are looked up at once; their codes fill a cache line."""
LINE_BYTES = 64
_MANTISSAS = 128
"""Number of mantissas of a bfloat16."""
_SMALLEST_NORMAL_CODE = 2.0**-6
# Around this number, the spacing of float32 is that of the smallest codes: adding it to a small number rounds to a
# code.
_ROUNDING = 2.0**14


def scale_of(build: Builder, largest: ir.Value, power_of_two: bool) -> tuple[ir.Value, ir.Value]:
    """Compute the bits of a block's scale from those of its largest magnitude, and whether (1 or 0) to halve it."""
    smallest = SMALLEST_MAGNITUDE_OF_POWERS if power_of_two else SMALLEST_MAGNITUDE
    magnitude = build.bitcast(build.larger(largest, constant(BITS_32, _bits(smallest))), FLOAT32)
    scale = build.bitcast(build.fdiv(magnitude, constant(FLOAT32, LARGEST_CODE)), BITS_32)
    if not power_of_two:
        return scale, constant(BITS_32, 0)
    # A nonzero mantissa carries into the exponent.
    scale = build.and_(build.add(scale, constant(BITS_32, 0x7FFFFF)), constant(BITS_32, 0x7F800000))
    limit = build.fmul(build.bitcast(scale, FLOAT32), constant(FLOAT32, HALVED_UP_TO))
    return scale, build.zext(build.fcmp_ordered("<=", magnitude, limit), BITS_32)


class Rule(NamedTuple):
    """The bits of a block's scale. `halved`, 0 or 1, is set for power-of-two scales only."""

    scale: ir.Value
    halved: ir.Value | None

    def encode(self, build: Builder, bits: ir.Value, lanes: int) -> ir.Value:
        """Compute the codes, 32 bits each, of magnitudes given as float32 bits."""
        divisor, magnitude = build.bitcast(self.scale, FLOAT32), build.bitcast(bits, vector(FLOAT32, lanes))
        if self.halved is None:
            return _encode(build, build.fdiv(magnitude, build.spread(divisor, lanes)), lanes)
        # Exact for powers of two.
        reciprocal = build.fdiv(constant(FLOAT32, 1.0), divisor)
        codes = _encode(build, build.fmul(magnitude, build.spread(reciprocal, lanes)), lanes)
        # The next exponent is 8 codes away; a subnormal's mantissa is doubled.
        doubling = build.mul(build.spread(self.halved, lanes), build.smaller(codes, constant(codes.type, 8)))
        return build.add(codes, doubling)


class Table(NamedTuple):
    """Codes by mantissa. Each step of the exponent adds 8; the highest bit of the sum is ignored."""

    halves: tuple[ir.Value, ir.Value]
    """Two tables of 64 bytes: the codes extrapolated to weights whose exponent bits are 0."""
    smallest: ir.Value
    """The bfloat16 bits of the smallest magnitude to look up; the codes of smaller ones may be subnormal."""

    @classmethod
    def of(cls, build: Builder, rule: Rule) -> "Table":
        """Compute the table from magnitudes with the exponent of the scale, whose quotients lie between 1/2 and 2."""
        whole = vector(BITS_32, _MANTISSAS)
        exponent = build.lshr(rule.scale, constant(BITS_32, 23))
        mantissas = ir.Constant(whole, [number << 16 for number in range(_MANTISSAS)])
        magnitudes = build.or_(build.spread(build.shl(exponent, constant(BITS_32, 23)), _MANTISSAS), mantissas)
        codes = rule.encode(build, magnitudes, _MANTISSAS)
        codes = build.sub(codes, build.spread(build.shl(exponent, constant(BITS_32, 3)), _MANTISSAS))
        low, high = (
            build.shuffle_vector(codes, codes, ir.Constant(vector(BITS_32, 64), list(range(first, first + 64))))
            for first in (0, 64)
        )
        eight = vector(BITS_8, 64)
        # At 5 exponents below the scale's, a quotient is above 2^-6: dividing by the scale's mantissa costs less than
        # one exponent.
        smallest = build.shl(build.sub(exponent, constant(BITS_32, 5)), constant(BITS_32, 7))
        return cls((build.trunc(low, eight), build.trunc(high, eight)), build.trunc(smallest, BITS_16))

    def knows(self, build: Builder, weights: ir.Value) -> ir.Value:
        """Whether all of these weights can be looked up."""
        magnitudes = build.and_(weights, constant(weights.type, 0x7FFF))
        are_small = build.icmp_unsigned("<", magnitudes, build.spread(self.smallest, LOOKED_UP))
        return build.icmp_unsigned("==", build.bitcast(are_small, BITS_64), constant(BITS_64, 0))

    def encode(self, build: Builder, weights: ir.Value) -> ir.Value:
        """Look up the 8-bit codes of weights for which `knows` is true."""
        eight = vector(BITS_8, LOOKED_UP)
        low = build.trunc(weights, eight)
        high = build.trunc(build.lshr(weights, constant(weights.type, 8)), eight)
        # The lowest bit of the exponent is in the low byte, the other bits are in the high byte.
        lowest = build.and_(build.lshr(low, constant(eight, 4)), constant(eight, 8))
        moved = build.add(build.look_up(self.halves, low), build.or_(build.shl(high, constant(eight, 4)), lowest))
        sign = build.and_(high, constant(eight, 0x80))
        return build.or_(build.and_(moved, constant(eight, 0x7F)), sign)


def _encode(build: Builder, quotient: ir.Value, lanes: int) -> ir.Value:
    """Round quotients of magnitudes and a scale to e4m3 codes, 32 bits each: to nearest, ties to even."""
    whole = vector(BITS_32, lanes)
    raw = build.bitcast(quotient, whole)
    # Rounds away 20 bits of the mantissa. The exponent biases are 127 and 7.
    odd = build.and_(build.lshr(raw, constant(whole, 20)), constant(whole, 1))
    rounded = build.add(build.add(raw, constant(whole, 0x7FFFF)), odd)
    normal = build.sub(build.lshr(rounded, constant(whole, 20)), constant(whole, (127 - 7) << 3))
    moved = build.bitcast(build.fadd(quotient, constant(quotient.type, _ROUNDING)), whole)
    small = build.sub(moved, constant(whole, _bits(_ROUNDING)))
    return build.select(build.icmp_signed("<", raw, constant(whole, _bits(_SMALLEST_NORMAL_CODE))), small, normal)


def float32_bits(build: Builder, bits: ir.Value, lanes: int) -> ir.Value:
    """Convert bits of bfloat16 or float32 to those of float32."""
    whole = vector(BITS_32, lanes)
    return bits if bits.type == whole else build.shl(build.zext(bits, whole), constant(whole, 16))


def _bits(value: float) -> int:
    """The float32 bits of a number."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


LARGEST_BITS = _bits(LARGEST_WEIGHT)
"""The float32 bits of the largest weight that has a code."""
