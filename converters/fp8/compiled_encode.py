"""Codes and scales of block FP8 in machine code, from the weights of a block and the largest magnitude among them.

The arithmetic is that of the kernel of a GPU (`megarl/resharding/kernels/on_gpu/block_fp8.py`), on bits. A bfloat16 has
a mantissa of 7 bits, and its exponents are as far apart as those of codes: where a processor looks bytes up, the codes
of all mantissas are computed once for a block, and each weight takes its own from them.
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
"""Weights whose codes are looked up at once; they fill a line of the caches."""
LINE_BYTES = 64
_MANTISSAS = 128
"""How many a bfloat16 has."""
_SMALLEST_NORMAL_CODE = 2.0**-6
# Its neighbours in float32 are as far apart as the smallest codes: adding it to a small number rounds that to a code.
_ROUNDING = 2.0**14


def scale_of(build: Builder, largest: ir.Value, power_of_two: bool) -> tuple[ir.Value, ir.Value]:
    """The bits of the scale of a block whose largest magnitude has these bits; and whether, as 0 or 1, it is halved."""
    smallest = SMALLEST_MAGNITUDE_OF_POWERS if power_of_two else SMALLEST_MAGNITUDE
    magnitude = build.bitcast(build.larger(largest, constant(BITS_32, _bits(smallest))), FLOAT32)
    scale = build.bitcast(build.fdiv(magnitude, constant(FLOAT32, LARGEST_CODE)), BITS_32)
    if not power_of_two:
        return scale, constant(BITS_32, 0)
    # A mantissa that is not zero carries into the exponent.
    scale = build.and_(build.add(scale, constant(BITS_32, 0x7FFFFF)), constant(BITS_32, 0x7F800000))
    limit = build.fmul(build.bitcast(scale, FLOAT32), constant(FLOAT32, HALVED_UP_TO))
    return scale, build.zext(build.fcmp_ordered("<=", magnitude, limit), BITS_32)


class Rule(NamedTuple):
    """The bits of the scale of a block; `halved`, 0 or 1, is there for scales that are powers of two."""

    scale: ir.Value
    halved: ir.Value | None

    def encode(self, build: Builder, bits: ir.Value, lanes: int) -> ir.Value:
        """The codes, in 32 bits each, of magnitudes whose bits in float32 these are."""
        divisor, magnitude = build.bitcast(self.scale, FLOAT32), build.bitcast(bits, vector(FLOAT32, lanes))
        if self.halved is None:
            return _encode(build, build.fdiv(magnitude, build.spread(divisor, lanes)), lanes)
        # Exact for a power of two.
        reciprocal = build.fdiv(constant(FLOAT32, 1.0), divisor)
        codes = _encode(build, build.fmul(magnitude, build.spread(reciprocal, lanes)), lanes)
        # The next exponent is 8 codes away; a subnormal mantissa is doubled.
        doubling = build.mul(build.spread(self.halved, lanes), build.smaller(codes, constant(codes.type, 8)))
        return build.add(codes, doubling)


class Table(NamedTuple):
    """Codes by mantissa, which a step of the exponent moves by 8; the highest bit of the sum does not count."""

    halves: tuple[ir.Value, ir.Value]
    """64 bytes each: the codes of weights whose exponent's bits are 0, were there such."""
    smallest: ir.Value
    """The bits in bfloat16 of the least magnitude that is looked up: below it codes may be subnormal."""

    @classmethod
    def of(cls, build: Builder, rule: Rule) -> "Table":
        """Computed for magnitudes with the exponent of the scale, whose quotients lie between 1/2 and 2."""
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
        # At 5 exponents below the scale's, a quotient is above 2^-6: the scale's mantissa takes less than one away.
        smallest = build.shl(build.sub(exponent, constant(BITS_32, 5)), constant(BITS_32, 7))
        return cls((build.trunc(low, eight), build.trunc(high, eight)), build.trunc(smallest, BITS_16))

    def knows(self, build: Builder, weights: ir.Value) -> ir.Value:
        """Whether all of these are looked up."""
        magnitudes = build.and_(weights, constant(weights.type, 0x7FFF))
        are_small = build.icmp_unsigned("<", magnitudes, build.spread(self.smallest, LOOKED_UP))
        return build.icmp_unsigned("==", build.bitcast(are_small, BITS_64), constant(BITS_64, 0))

    def encode(self, build: Builder, weights: ir.Value) -> ir.Value:
        """The codes of weights that it knows, of 8 bits."""
        eight = vector(BITS_8, LOOKED_UP)
        low = build.trunc(weights, eight)
        high = build.trunc(build.lshr(weights, constant(weights.type, 8)), eight)
        # The lowest bit of the exponent lies in the one byte, the others in the other.
        lowest = build.and_(build.lshr(low, constant(eight, 4)), constant(eight, 8))
        moved = build.add(build.look_up(self.halves, low), build.or_(build.shl(high, constant(eight, 4)), lowest))
        sign = build.and_(high, constant(eight, 0x80))
        return build.or_(build.and_(moved, constant(eight, 0x7F)), sign)


def _encode(build: Builder, quotient: ir.Value, lanes: int) -> ir.Value:
    """The e4m3 codes of magnitudes over a scale, in 32 bits each: to nearest, ties to even."""
    whole = vector(BITS_32, lanes)
    raw = build.bitcast(quotient, whole)
    # 20 bits of the mantissa are rounded away, and the exponents' biases are 127 and 7.
    odd = build.and_(build.lshr(raw, constant(whole, 20)), constant(whole, 1))
    rounded = build.add(build.add(raw, constant(whole, 0x7FFFF)), odd)
    normal = build.sub(build.lshr(rounded, constant(whole, 20)), constant(whole, (127 - 7) << 3))
    moved = build.bitcast(build.fadd(quotient, constant(quotient.type, _ROUNDING)), whole)
    small = build.sub(moved, constant(whole, _bits(_ROUNDING)))
    return build.select(build.icmp_signed("<", raw, constant(whole, _bits(_SMALLEST_NORMAL_CODE))), small, normal)


def float32_bits(build: Builder, bits: ir.Value, lanes: int) -> ir.Value:
    """Bits of bfloat16 or float32 as those of float32."""
    whole = vector(BITS_32, lanes)
    return bits if bits.type == whole else build.shl(build.zext(bits, whole), constant(whole, 16))


def _bits(value: float) -> int:
    """The bits of a number as float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


LARGEST_BITS = _bits(LARGEST_WEIGHT)
"""The bits of the largest weight that has a code, in float32."""
