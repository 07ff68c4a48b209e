"""The rule of `dequantise` in machine code: bitwise the same results in a fraction of the time."""

from functools import cache

import torch
from llvmlite import ir

from converters.fp8.blocks import BLOCK
from converters.fp8.compiled_quantise import WEIGHTS
from converters.machine_code import (
    BITS_8,
    BITS_16,
    BITS_32,
    BITS_64,
    FLOAT32,
    POINTER,
    Builder,
    Function,
    constant,
    vector,
)

_DECODED = 32
"""Elements of a row decoded at once."""
_NAN = 0x7F
_SMALLEST_CODE = 2.0**-9


def knows(codes: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether these tensors are supported: both must be on the CPU, with rows that are contiguous."""
    return all(each.is_cpu and each.stride(1) == 1 for each in (codes, out))


def dequantise(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, row_start: int, column_start: int) -> bool:
    """Write the values as `dequantise_into` does, from the float32 `scales` of the blocks that the box overlaps.

    Returns False if a code is NaN; `out` is undefined then.
    """
    tensors = (codes, scales, out)
    addresses, strides = [each.data_ptr() for each in tensors], [each.stride(0) for each in tensors]
    largest = _function(out.dtype)(*addresses, *strides, *codes.shape, row_start % BLOCK, column_start % BLOCK)
    return largest < _NAN


@cache
def _function(dtype: torch.dtype) -> Function:
    """Compile the function of the arguments above; it returns the largest magnitude of a code."""
    kind = WEIGHTS[dtype]
    build = Builder("dequantise", [POINTER] * 3 + [BITS_64] * 7)
    codes, scales, out, codes_stride, scales_stride, out_stride, rows, columns, above, before = build.function.args
    largest = tuple(build.variable(constant(vector(BITS_8, lanes), 0)) for lanes in (_DECODED, 1))
    zero, size = constant(BITS_64, 0), constant(BITS_64, BLOCK)
    with build.loop(zero, rows) as row:
        source = build.element(codes, build.mul(row, codes_stride), BITS_8)
        target = build.element(out, build.mul(row, out_stride), kind)
        of_row = build.mul(build.udiv(build.add(row, above), size), scales_stride)
        # Columns are counted from the start of the first block, not of the box.
        with build.loop(zero, build.add(columns, before), BLOCK) as left:
            scale = build.read(build.element(scales, build.add(of_row, build.udiv(left, size)), FLOAT32), FLOAT32)
            # `before` instead of `left` if the box begins in this block
            start = build.sub(build.larger(left, before), before)
            stop = build.sub(build.smaller(build.add(left, size), build.add(columns, before)), before)
            _decode_row(build, (source, target), kind, (start, stop), scale, largest)
    together, alone = (build.load(place, typ=place.allocated_type) for place in largest)
    return build.compiled(build.zext(build.larger(build.largest_lane(together), alone), BITS_32))


def _decode_row(
    build: Builder,
    row: tuple[ir.Value, ir.Value],
    kind: ir.Type,
    ends: tuple[ir.Value, ir.Value],
    scale: ir.Value,
    largest: tuple[ir.Value, ...],
) -> None:
    """Decode the part of a row that lies in one block, and update the largest code."""
    source, target = row

    def work(column: ir.Value, lanes: int) -> None:
        codes = build.read(build.element(source, column, BITS_8), vector(BITS_8, lanes))
        build.keep_largest(largest[0 if lanes > 1 else 1], build.and_(codes, constant(codes.type, _NAN)))
        values = build.fmul(_decode(build, codes, lanes), build.spread(scale, lanes))
        bits = build.bitcast(values, vector(BITS_32, lanes))
        build.write(build.element(target, column, kind), bits if kind == BITS_32 else _bfloat16(build, bits, lanes))

    build.across(*ends, _DECODED, work)


def _decode(build: Builder, codes: ir.Value, lanes: int) -> ir.Value:
    """Convert e4m3 codes, none of which is NaN, to float32."""
    whole, real = vector(BITS_32, lanes), vector(FLOAT32, lanes)
    wide = build.zext(codes, whole)
    magnitude = build.and_(wide, constant(whole, _NAN))
    # The exponent biases are 127 and 7.
    normal = build.add(build.shl(magnitude, constant(whole, 20)), constant(whole, (127 - 7) << 23))
    small = build.bitcast(build.fmul(build.sitofp(magnitude, real), constant(real, _SMALLEST_CODE)), whole)
    bits = build.select(build.icmp_unsigned("<", magnitude, constant(whole, 8)), small, normal)
    sign = build.shl(build.and_(wide, constant(whole, 0x80)), constant(whole, 24))
    return build.bitcast(build.or_(bits, sign), real)


def _bfloat16(build: Builder, bits: ir.Value, lanes: int) -> ir.Value:
    """Round float32 bits, not NaN, to bfloat16 bits: to nearest, ties to even."""
    odd = build.and_(build.lshr(bits, constant(bits.type, 16)), constant(bits.type, 1))
    rounded = build.add(build.add(bits, constant(bits.type, 0x7FFF)), odd)
    return build.trunc(build.lshr(rounded, constant(bits.type, 16)), vector(BITS_16, lanes))
