"""Number conversions for GPU kernels: the bits of float32, and e4m3 codes."""

import triton
import triton.language as tl

_SMALLEST_NORMAL_CODE = tl.constexpr(2.0**-6)
# At this magnitude the spacing of float32 is the smallest e4m3 subnormal, so adding it rounds a small number to a code.
_ROUNDING = tl.constexpr(2.0**14)


@triton.jit
def bits_of(value):
    """The bits of a number as float32."""
    return tl.full((), value, tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def float32_bits(values):
    """The bits, as float32, of bfloat16 or float32."""
    if values.dtype == tl.bfloat16:
        return values.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:  # Triton compiles what stands behind a return, too
        return values.to(tl.int32, bitcast=True)


@triton.jit
def e4m3(quotient):
    """The e4m3 codes of magnitudes up to 448, in 32 bits each, rounded to nearest, ties to even."""
    raw = quotient.to(tl.int32, bitcast=True)
    # Round away 20 bits of the mantissa, and change the exponent's bias from 127 to 7.
    normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = (quotient + _ROUNDING).to(tl.int32, bitcast=True) - bits_of(_ROUNDING)
    return tl.where(raw < bits_of(_SMALLEST_NORMAL_CODE), small, normal)


@triton.jit
def signed(codes, bits):
    """Add the signs of float32 numbers, given by their bits, to the codes of their magnitudes; returns bytes."""
    return (codes | ((bits >> 24) & 0x80)).to(tl.int8)
