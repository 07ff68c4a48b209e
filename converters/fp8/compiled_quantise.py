"""The rule of `quantise` in machine code: the same bits in a fraction of the time, most of which torch would convert.

The arithmetic is that of the kernel of a GPU (`megarl/resharding/kernels/on_gpu/block_fp8.py`), on bits. A bfloat16 has
a mantissa of 7 bits, and its exponents are as far apart as those of codes: where a processor looks bytes up, the codes
of all mantissas are computed once for a block, and each weight takes its own from them.
"""

import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain, pairwise
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
    LOOKS_UP,
    POINTER,
    Builder,
    Function,
    constant,
    processor_has,
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
_LOOKED_UP = 64
"""The same where codes are looked up; they fill a line of the caches."""
_MANTISSAS = 128
"""How many a bfloat16 has."""
_SIDE_BY_SIDE = 2
"""Blocks that are searched and encoded together, a row of all of them after the other: memory is faster so."""
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
    # Stores that went past the caches have to be visible to whoever is told of them.
    build.fence("seq_cst")
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
        self._looks_up = dtype == torch.bfloat16 and processor_has(LOOKS_UP)
        self._of_all = build.variable(constant(BITS_32, 0))
        self._of_blocks = [
            tuple(build.variable(constant(vector(self._kind, lanes), 0)) for lanes in (_SEARCHED, 1))
            for _ in range(_SIDE_BY_SIDE)
        ]

    def largest(self) -> ir.Value:
        """The bits, in float32, of the largest magnitude so far; above `LARGEST_BITS` there are no codes for it."""
        return self._build.load(self._of_all, typ=BITS_32)

    def row_of_blocks(self, matrix: Matrix, ends: _Ends) -> None:
        """Write the codes and the scales of the rows from `ends[0]`, where blocks begin, to below `ends[1]`.

        While blocks are encoded, the next ones are searched: the one computes, and the other waits for memory.
        """
        build, zero, step = self._build, constant(BITS_64, 0), _SIDE_BY_SIDE * BLOCK
        middle = build.and_(matrix.columns, constant(BITS_64, -step))
        last = build.sub(middle, constant(BITS_64, step))
        with build.if_then(build.icmp_signed(">", middle, zero)):
            self._each_row(matrix, ends, searched=self._side_by_side(zero))
        with build.loop(zero, middle, step) as left:
            # Beside the last ones these are searched once more: that takes less than to be a case of its own.
            beside = build.smaller(build.add(left, constant(BITS_64, step)), last)
            ahead = build.add(beside, constant(BITS_64, step))
            encoded = self._encoders(matrix, ends[0], self._side_by_side(left))
            self._each_row(matrix, ends, encoded, self._side_by_side(beside), (ahead, middle))
        self._forget()
        with build.loop(middle, matrix.columns, BLOCK) as left:
            columns = [(left, build.smaller(build.add(left, constant(BITS_64, BLOCK)), matrix.columns))]
            self._each_row(matrix, ends, searched=columns)
            self._each_row(matrix, ends, self._encoders(matrix, ends[0], columns))

    def _side_by_side(self, left: ir.Value) -> list[_Ends]:
        starts = [self._build.add(left, constant(BITS_64, number * BLOCK)) for number in range(_SIDE_BY_SIDE + 1)]
        return list(pairwise(starts))

    def _encoders(self, matrix: Matrix, top: ir.Value, blocks: Sequence[_Ends]) -> "list[_Encoder]":
        """For the blocks that were searched last; writes their scales."""
        searched = [_largest(self._build, places) for places in self._of_blocks[: len(blocks)]]
        self._forget()
        pairs = zip(blocks, searched, strict=True)
        return [self._encoder(matrix, top, columns, largest) for columns, largest in pairs]

    def _forget(self) -> None:
        for place in chain.from_iterable(self._of_blocks):
            self._build.store(constant(place.allocated_type, 0), place)

    def _encoder(self, matrix: Matrix, top: ir.Value, columns: _Ends, largest: ir.Value) -> "_Encoder":
        build, size = self._build, constant(BITS_64, BLOCK)
        build.keep_largest(self._of_all, largest)
        scale, halved = _scale(build, largest, self._power_of_two)
        at = build.add(build.mul(build.udiv(top, size), matrix.scales_stride), build.udiv(columns[0], size))
        # A power of two is halved in its exponent.
        kept = build.sub(scale, build.shl(halved, constant(BITS_32, 23)))
        build.write(build.element(matrix.scales, at, BITS_32), kept)
        rule = _Rule(scale, halved if self._power_of_two else None)
        return _Encoder(columns, rule, _Table.of(build, rule) if self._looks_up else None)

    def _each_row(
        self,
        matrix: Matrix,
        ends: _Ends,
        encoded: "Sequence[_Encoder]" = (),
        searched: Sequence[_Ends] = (),
        ahead: _Ends | None = None,
    ) -> None:
        """Search blocks and encode others; `ahead` are the columns that are searched next, and the end of all."""
        build, kind = self._build, self._kind
        with build.loop(*ends) as row:
            source = build.element(matrix.weight, build.mul(row, matrix.weight_stride), kind)
            target = build.element(matrix.codes, build.mul(row, matrix.codes_stride), BITS_8)
            if ahead is not None:
                self._prefetch(matrix, row, ahead)
            for columns, places in zip(searched, self._of_blocks, strict=False):
                _search(build, kind, source, columns, places)
            for encoder in encoded:
                encoder.encode_row(build, source, target, kind)

    def _prefetch(self, matrix: Matrix, row: ir.Value, ahead: _Ends) -> None:
        """Have what is searched after the next brought near: a processor foresees no rows that are so far apart."""
        build, (left, end) = self._build, ahead
        is_past = build.icmp_signed(">=", left, end)
        below = build.select(is_past, constant(BITS_64, BLOCK), constant(BITS_64, 0))
        at = build.add(
            build.mul(build.add(row, below), matrix.weight_stride), build.select(is_past, constant(BITS_64, 0), left)
        )
        start = build.element(matrix.weight, at, self._kind)
        for offset in range(0, _SIDE_BY_SIDE * BLOCK * self.weight_bytes, _LINE_BYTES):
            build.prefetch(build.element(start, constant(BITS_64, offset), BITS_8))


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


class _Rule(NamedTuple):
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


class _Table(NamedTuple):
    """Codes by mantissa, which a step of the exponent moves by 8; the highest bit of the sum does not count."""

    halves: tuple[ir.Value, ir.Value]
    """64 bytes each: the codes of weights whose exponent's bits are 0, were there such."""
    smallest: ir.Value
    """The bits in bfloat16 of the least magnitude that is looked up: below it codes may be subnormal."""

    @classmethod
    def of(cls, build: Builder, rule: _Rule) -> "_Table":
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
        are_small = build.icmp_unsigned("<", magnitudes, build.spread(self.smallest, _LOOKED_UP))
        return build.icmp_unsigned("==", build.bitcast(are_small, BITS_64), constant(BITS_64, 0))

    def encode(self, build: Builder, weights: ir.Value) -> ir.Value:
        """The codes of weights that it knows, of 8 bits."""
        eight = vector(BITS_8, _LOOKED_UP)
        low = build.trunc(weights, eight)
        high = build.trunc(build.lshr(weights, constant(weights.type, 8)), eight)
        # The lowest bit of the exponent lies in the one byte, the others in the other.
        lowest = build.and_(build.lshr(low, constant(eight, 4)), constant(eight, 8))
        moved = build.add(build.look_up(self.halves, low), build.or_(build.shl(high, constant(eight, 4)), lowest))
        sign = build.and_(high, constant(eight, 0x80))
        return build.or_(build.and_(moved, constant(eight, 0x7F)), sign)


class _Encoder(NamedTuple):
    """The columns of a block, and how its weights become codes."""

    columns: _Ends
    rule: _Rule
    table: _Table | None

    def encode_row(self, build: Builder, source: ir.Value, target: ir.Value, kind: ir.Type) -> None:
        """Write the codes of the block's part of a row."""

        def work(column: ir.Value, lanes: int) -> None:
            own = build.read(build.element(source, column, kind), vector(kind, lanes))
            to = build.element(target, column, BITS_8)
            if self.table is None or lanes == 1:
                build.write(to, self._computed(build, own, lanes))
                return
            with build.if_else(self.table.knows(build, own), likely=True) as (looked_up, computed):
                with looked_up:
                    _write_line(build, to, self.table.encode(build, own))
                with computed:
                    build.write(to, self._computed(build, own, lanes))

        build.across(*self.columns, _ENCODED if self.table is None else _LOOKED_UP, work)

    def _computed(self, build: Builder, own: ir.Value, lanes: int) -> ir.Value:
        whole = vector(BITS_32, lanes)
        bits = _float32_bits(build, own, lanes)
        codes = self.rule.encode(build, build.and_(bits, constant(whole, 0x7FFFFFFF)), lanes)
        sign = build.and_(build.lshr(bits, constant(whole, 24)), constant(whole, 0x80))
        return build.trunc(build.or_(codes, sign), vector(BITS_8, lanes))


def _write_line(build: Builder, to: ir.Value, codes: ir.Value) -> None:
    """Write 64 codes past the caches where they are a line of them."""
    offset = build.and_(build.ptrtoint(to, BITS_64), constant(BITS_64, _LINE_BYTES - 1))
    is_line = build.icmp_unsigned("==", offset, constant(BITS_64, 0))
    with build.if_else(is_line, likely=True) as (line, other):
        with line:
            build.write_past_caches(to, codes)
        with other:
            build.write(to, codes)


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
