"""Numbers of a GPU's kernel: float32 by its bits, and the codes of e4m3."""

import triton
import triton.language as tl

_SMALLEST_NORMAL_CODE = tl.constexpr(2.0**-6)
# Its neighbours in float32 are as far apart as the smallest codes: adding it to a small number rounds that to a code.
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
    """The codes of magnitudes up to 448, in 32 bits each: to nearest, ties to even."""
    raw = quotient.to(tl.int32, bitcast=True)
    # 20 bits of the mantissa are rounded away, and the exponents' biases are 127 and 7.
    normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = (quotient + _ROUNDING).to(tl.int32, bitcast=True) - bits_of(_ROUNDING)
    return tl.where(raw < bits_of(_SMALLEST_NORMAL_CODE), small, normal)


@triton.jit
def signed(codes, bits):
    """The codes of magnitudes as bytes, with the signs of numbers of float32."""
    return (codes | ((bits >> 24) & 0x80)).to(tl.int8)
