"""The rule of `quantise` in machine code: the same bits in a fraction of the time, most of which torch would convert.

Blocks are searched for the largest magnitude, and then encoded (`compiled_encode.py`).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

import torch
from llvmlite import ir

from converters.fp8.blocks import BLOCK
from converters.fp8.compiled_encode import LARGEST_BITS, LINE_BYTES, LOOKED_UP, Rule, Table, float32_bits, scale_of
from converters.machine_code import (
    BITS_8,
    BITS_16,
    BITS_32,
    BITS_64,
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
_SIDE_BY_SIDE = 2
"""Blocks that are searched and encoded together, a row of all of them after the other: memory is faster so."""
SIDE_BY_SIDE_COLUMNS = _SIDE_BY_SIDE * BLOCK
_THREAD_ELEMENTS = 2**21
"""Elements for each thread at least: it takes a tenth of the time of these to begin."""


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


class CodesReader(Protocol):
    """A part of a function that reads codes, 64 at once, while a register has them.

    Codes come row by row over some blocks side by side, then over the next blocks.
    """

    def begin(self) -> None:
        """Take note that blocks begin."""

    def read(self, number: int, codes: ir.Value) -> None:
        """Take the next codes at this place in a row of the blocks."""

    def end(self) -> None:
        """Take note that the blocks have ended."""


class Quantisation:
    """The part of a function that quantises weights of a type; made before its first loop."""

    def __init__(self, build: Builder, dtype: torch.dtype, *, power_of_two: bool) -> None:
        self._build, self._kind, self._power_of_two = build, WEIGHTS[dtype], power_of_two
        self.weight_bytes = dtype.itemsize
        self.looks_up = dtype == torch.bfloat16 and processor_has(LOOKS_UP)
        self._of_all = build.variable(constant(BITS_32, 0))
        self._of_blocks = [
            tuple(build.variable(constant(vector(self._kind, lanes), 0)) for lanes in (_SEARCHED, 1))
            for _ in range(_SIDE_BY_SIDE)
        ]

    def largest(self) -> ir.Value:
        """The bits, in float32, of the largest magnitude so far; above `LARGEST_BITS` there are no codes for it."""
        return self._build.load(self._of_all, typ=BITS_32)

    def row_of_blocks(self, matrix: Matrix, ends: _Ends, reader: CodesReader | None = None) -> None:
        """Write the codes and the scales of the rows from `ends[0]`, where blocks begin, to below `ends[1]`.

        While blocks are encoded, the next ones are searched: the one computes, and the other waits for memory. A
        `reader` is for processors that look codes up, and multiples of `SIDE_BY_SIDE_COLUMNS` alone.
        """
        build, zero, step = self._build, constant(BITS_64, 0), SIDE_BY_SIDE_COLUMNS
        middle = build.and_(matrix.columns, constant(BITS_64, -step))
        last = build.sub(middle, constant(BITS_64, step))
        with build.if_then(build.icmp_signed(">", middle, zero)):
            self._each_row(matrix, ends, searched=self._side_by_side(zero))
        with build.loop(zero, middle, step) as left:
            # Beside the last ones these are searched once more: that takes less than to be a case of its own.
            beside = build.smaller(build.add(left, constant(BITS_64, step)), last)
            ahead = build.add(beside, constant(BITS_64, step))
            encoded = self._encoders(matrix, ends[0], self._side_by_side(left))
            if reader is not None:
                reader.begin()
            self._each_row(matrix, ends, encoded, self._side_by_side(beside), (ahead, middle), reader)
            if reader is not None:
                reader.end()
        self._forget()
        if reader is not None:
            return
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
        scale, halved = scale_of(build, largest, self._power_of_two)
        at = build.add(build.mul(build.udiv(top, size), matrix.scales_stride), build.udiv(columns[0], size))
        # A power of two is halved in its exponent.
        kept = build.sub(scale, build.shl(halved, constant(BITS_32, 23)))
        build.write(build.element(matrix.scales, at, BITS_32), kept)
        rule = Rule(scale, halved if self._power_of_two else None)
        return _Encoder(columns, rule, Table.of(build, rule) if self.looks_up else None)

    def _each_row(
        self,
        matrix: Matrix,
        ends: _Ends,
        encoded: "Sequence[_Encoder]" = (),
        searched: Sequence[_Ends] = (),
        ahead: _Ends | None = None,
        reader: CodesReader | None = None,
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
            for number, encoder in enumerate(encoded):
                if reader is None:
                    encoder.encode_row(build, source, target, kind)
                else:
                    encoder.encode_for(reader, number, build, source, target)

    def _prefetch(self, matrix: Matrix, row: ir.Value, ahead: _Ends) -> None:
        """Have what is searched after the next brought near: a processor foresees no rows that are so far apart."""
        build, (left, end) = self._build, ahead
        is_past = build.icmp_signed(">=", left, end)
        below = build.select(is_past, constant(BITS_64, BLOCK), constant(BITS_64, 0))
        at = build.add(
            build.mul(build.add(row, below), matrix.weight_stride), build.select(is_past, constant(BITS_64, 0), left)
        )
        start = build.element(matrix.weight, at, self._kind)
        for offset in range(0, SIDE_BY_SIDE_COLUMNS * self.weight_bytes, LINE_BYTES):
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
    return float32_bits(build, build.larger(build.largest_lane(together), alone), 1)


class _Encoder(NamedTuple):
    """The columns of a block, and how its weights become codes."""

    columns: _Ends
    rule: Rule
    table: Table | None

    def encode_row(self, build: Builder, source: ir.Value, target: ir.Value, kind: ir.Type) -> None:
        """Write the codes of the block's part of a row."""

        def work(column: ir.Value, lanes: int) -> None:
            own = build.read(build.element(source, column, kind), vector(kind, lanes))
            to = build.element(target, column, BITS_8)
            if lanes == LOOKED_UP:
                _write_line(build, to, self._codes(build, own))
            else:
                build.write(to, self._computed(build, own, lanes))

        build.across(*self.columns, _ENCODED if self.table is None else LOOKED_UP, work)

    def encode_for(self, reader: CodesReader, block: int, build: Builder, source: ir.Value, target: ir.Value) -> None:
        """The same of a whole block, the one of this number among those side by side, with a reader of the codes."""
        for number in range(BLOCK // LOOKED_UP):
            column = build.add(self.columns[0], constant(BITS_64, number * LOOKED_UP))
            own = build.read(build.element(source, column, BITS_16), vector(BITS_16, LOOKED_UP))
            codes = self._codes(build, own)
            _write_line(build, build.element(target, column, BITS_8), codes)
            reader.read(block * BLOCK // LOOKED_UP + number, codes)

    def _codes(self, build: Builder, own: ir.Value) -> ir.Value:
        """The codes of as many weights as are looked up at once, if all of these are."""
        assert self.table is not None
        codes = []
        with build.if_else(self.table.knows(build, own), likely=True) as (looked_up, computed):
            with looked_up:
                codes.append((self.table.encode(build, own), build.block))
            with computed:
                codes.append((self._computed(build, own, LOOKED_UP), build.block))
        found = build.phi(vector(BITS_8, LOOKED_UP))
        for value, block in codes:
            found.add_incoming(value, block)
        return found

    def _computed(self, build: Builder, own: ir.Value, lanes: int) -> ir.Value:
        whole = vector(BITS_32, lanes)
        bits = float32_bits(build, own, lanes)
        codes = self.rule.encode(build, build.and_(bits, constant(whole, 0x7FFFFFFF)), lanes)
        sign = build.and_(build.lshr(bits, constant(whole, 24)), constant(whole, 0x80))
        return build.trunc(build.or_(codes, sign), vector(BITS_8, lanes))


def _write_line(build: Builder, to: ir.Value, codes: ir.Value) -> None:
    """Write 64 codes past the caches where they are a line of them."""
    offset = build.and_(build.ptrtoint(to, BITS_64), constant(BITS_64, LINE_BYTES - 1))
    is_line = build.icmp_unsigned("==", offset, constant(BITS_64, 0))
    with build.if_else(is_line, likely=True) as (line, other):
        with line:
            build.write_past_caches(to, codes)
        with other:
            build.write(to, codes)
