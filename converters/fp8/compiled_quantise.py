"""The rule of `quantise` in machine code: the same bits in a fraction of the time, most of which torch would convert.

The arithmetic is that of the kernel of a GPU (`megarl/resharding/kernels/on_gpu/block_fp8.py`), on bits.
"""

import struct
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch
from llvmlite import ir

from converters.fp8.blocks import (
    BLOCK,
    HALVED_UP_TO,
    LARGEST_CODE,
    LARGEST_WEIGHT,
    SMALLEST_MAGNITUDE,
    SMALLEST_MAGNITUDE_OF_POWERS,
)
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

WEIGHTS = {torch.bfloat16: BITS_16, torch.float32: BITS_32}
"""The types of weights that machine code reads and writes, as bits."""
_Ends = tuple[ir.Value, ir.Value]
"""The first column of a part of a row, and the one behind it."""
_SEARCHED = 64
"""Elements of a row that are searched at once for the largest magnitude."""
_ENCODED = 32
"""Elements of a row that are encoded at once."""
_LINE_BYTES = 64
_THREAD_ELEMENTS = 2**21
"""Elements for each thread at least: it takes a tenth of the time of these to begin."""
_SMALLEST_NORMAL_CODE = 2.0**-6
# Its neighbours in float32 are as far apart as the smallest codes: adding it to a small number rounds that to a code.
_ROUNDING = 2.0**14


def knows(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether these can be worked on here: others are in another type, or have gaps between columns."""
    tensors = (weight, codes, scales)
    return weight.dtype in WEIGHTS and all(each.is_cpu and each.stride(1) == 1 for each in tensors)


def quantise(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, power_of_two: bool) -> bool:
    """Write codes and scales as `quantise_into`, by as many threads as torch would take.

    False where a weight has no code; codes and scales are undefined then.
    """
    function = _function(weight.dtype, power_of_two)
    threads = min(torch.get_num_threads(), weight.numel() // _THREAD_ELEMENTS, scales.shape[0])
    if threads <= 1:
        return function(*_arguments(weight, codes, scales)) <= LARGEST_BITS
    blocks = -(-scales.shape[0] // threads)
    parts = zip(weight.split(blocks * BLOCK), codes.split(blocks * BLOCK), scales.split(blocks), strict=True)
    calls = [_arguments(*part) for part in parts]
    with ThreadPoolExecutor(threads) as pool:
        return max(pool.map(lambda arguments: function(*arguments), calls)) <= LARGEST_BITS


def _arguments(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> tuple[int, ...]:
    tensors = (weight, codes, scales)
    return *(each.data_ptr() for each in tensors), *weight.shape, *(each.stride(0) for each in tensors)


@cache
def _function(dtype: torch.dtype, power_of_two: bool) -> Function:
    """The function of the arguments above; it returns the bits of the largest magnitude in float32."""
    build = Builder("quantise", [POINTER] * 3 + [BITS_64] * 5)
    weight, codes, scales, rows, columns, *strides = build.function.args
    quantisation = Quantisation(build, dtype, power_of_two=power_of_two)
    matrix = Matrix(weight, codes, scales, columns, *strides)
    with build.loop(constant(BITS_64, 0), rows, BLOCK) as top:
        bottom = build.smaller(build.add(top, constant(BITS_64, BLOCK)), rows)
        quantisation.row_of_blocks(matrix, (top, bottom))
    return build.compiled(quantisation.largest())


class Matrix(NamedTuple):
    """A weight, its codes and its scales in a function: addresses, and distances of rows in elements."""

    weight: ir.Value
    codes: ir.Value
    scales: ir.Value
    columns: ir.Value
    weight_stride: ir.Value
    codes_stride: ir.Value
    scales_stride: ir.Value


class Quantisation:
    """The part of a function that quantises weights of a type; made before its first loop."""

    def __init__(self, build: Builder, dtype: torch.dtype, *, power_of_two: bool) -> None:
        self._build, self._kind, self._power_of_two = build, WEIGHTS[dtype], power_of_two
        self.weight_bytes = dtype.itemsize
        self._of_all = build.variable(constant(BITS_32, 0))
        self._of_block = tuple(build.variable(constant(vector(self._kind, lanes), 0)) for lanes in (_SEARCHED, 1))

    def largest(self) -> ir.Value:
        """The bits, in float32, of the largest magnitude so far; above `LARGEST_BITS` there are no codes for it."""
        return self._build.load(self._of_all, typ=BITS_32)

    def row_of_blocks(self, matrix: Matrix, ends: _Ends) -> None:
        """Write the codes and the scales of the rows from `ends[0]`, where blocks begin, to below `ends[1]`."""
        build, size = self._build, constant(BITS_64, BLOCK)
        with build.loop(constant(BITS_64, 0), matrix.columns, BLOCK) as left:
            right = build.smaller(build.add(left, size), matrix.columns)
            self._block(matrix, ends, (left, right))

    def _block(self, matrix: Matrix, rows: _Ends, columns: _Ends) -> None:
        build, kind, zero, size = self._build, self._kind, constant(BITS_64, 0), constant(BITS_64, BLOCK)
        (top, bottom), (left, right) = rows, columns
        for place in self._of_block:
            build.store(constant(place.allocated_type, 0), place)
        with build.loop(top, bottom) as row:
            source = build.element(matrix.weight, build.mul(row, matrix.weight_stride), kind)
            _search(build, kind, source, columns, self._of_block)
        largest = _largest(build, self._of_block)
        build.keep_largest(self._of_all, largest)
        scale, halved = _scale(build, largest, self._power_of_two)
        at = build.add(build.mul(build.udiv(top, size), matrix.scales_stride), build.udiv(left, size))
        # A power of two is halved in its exponent.
        kept = build.sub(scale, build.shl(halved, constant(BITS_32, 23)))
        build.write(build.element(matrix.scales, at, BITS_32), kept)
        # The next block lies to the right, or below at the left.
        is_last = build.icmp_unsigned("==", right, matrix.columns)
        below, beside = build.select(is_last, size, zero), build.select(is_last, zero, right)
        with build.loop(top, bottom) as row:
            source = build.element(matrix.weight, build.mul(row, matrix.weight_stride), kind)
            target = build.element(matrix.codes, build.mul(row, matrix.codes_stride), BITS_8)
            # The same row of the next block: rows are too far apart for the processor to foresee it.
            ahead = [
                build.add(build.mul(build.add(row, below), stride), beside)
                for stride in (matrix.weight_stride, matrix.codes_stride)
            ]
            _prefetch(build, build.element(matrix.weight, ahead[0], kind), kind, to_write=False)
            _prefetch(build, build.element(matrix.codes, ahead[1], BITS_8), BITS_8, to_write=True)
            _encode_row(build, (source, target), kind, columns, scale, halved if self._power_of_two else None)


def _search(build: Builder, kind: ir.Type, source: ir.Value, ends: _Ends, of_block: tuple[ir.Value, ...]) -> None:
    """Keep the largest magnitudes of part of a row, as bits."""

    def work(column: ir.Value, lanes: int) -> None:
        bits = build.read(build.element(source, column, kind), vector(kind, lanes))
        magnitudes = build.and_(bits, constant(bits.type, 2 ** (kind.width - 1) - 1))
        build.keep_largest(of_block[0 if lanes > 1 else 1], magnitudes)

    build.across(*ends, _SEARCHED, work)


def _largest(build: Builder, of_block: tuple[ir.Value, ...]) -> ir.Value:
    """The bits, in float32, of the largest magnitude of a block."""
    together, alone = (build.load(place, typ=place.allocated_type) for place in of_block)
    return _float32_bits(build, build.larger(build.largest_lane(together), alone), 1)


def _prefetch(build: Builder, start: ir.Value, kind: ir.Type, *, to_write: bool) -> None:
    """Have the next elements brought into the cache, as many as a row of a block has."""
    for offset in range(0, BLOCK * kind.width // 8, _LINE_BYTES):
        build.prefetch(build.element(start, constant(BITS_64, offset), BITS_8), to_write=to_write)


def _scale(build: Builder, largest: ir.Value, power_of_two: bool) -> tuple[ir.Value, ir.Value]:
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


def _encode_row(
    build: Builder,
    row: tuple[ir.Value, ir.Value],
    kind: ir.Type,
    ends: _Ends,
    scale: ir.Value,
    halved: ir.Value | None,
) -> None:
    """Write the codes of part of a row; `halved` is there for scales that are powers of two."""
    source, target = row
    divisor = build.bitcast(scale, FLOAT32)
    # Exact for a power of two, for which alone it is used.
    reciprocal = build.fdiv(constant(FLOAT32, 1.0), divisor)

    def work(column: ir.Value, lanes: int) -> None:
        own = build.read(build.element(source, column, kind), vector(kind, lanes))
        bits = _float32_bits(build, own, lanes)
        whole, real = vector(BITS_32, lanes), vector(FLOAT32, lanes)
        magnitude = build.bitcast(build.and_(bits, constant(whole, 0x7FFFFFFF)), real)
        if halved is None:
            codes = _encode(build, build.fdiv(magnitude, build.spread(divisor, lanes)), lanes)
        else:
            codes = _encode(build, build.fmul(magnitude, build.spread(reciprocal, lanes)), lanes)
            # The next exponent is 8 codes away; a subnormal mantissa is doubled.
            doubling = build.mul(build.spread(halved, lanes), build.smaller(codes, constant(whole, 8)))
            codes = build.add(codes, doubling)
        sign = build.and_(build.lshr(bits, constant(whole, 24)), constant(whole, 0x80))
        build.write(build.element(target, column, BITS_8), build.trunc(build.or_(codes, sign), vector(BITS_8, lanes)))

    build.across(*ends, _ENCODED, work)


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


def _float32_bits(build: Builder, bits: ir.Value, lanes: int) -> ir.Value:
    """Bits of bfloat16 or float32 as those of float32."""
    whole = vector(BITS_32, lanes)
    return bits if bits.type == whole else build.shl(build.zext(bits, whole), constant(whole, 16))


def _bits(value: float) -> int:
    """The bits of a number as float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


LARGEST_BITS = _bits(LARGEST_WEIGHT)
"""The bits of the largest weight that has a code, in float32."""
