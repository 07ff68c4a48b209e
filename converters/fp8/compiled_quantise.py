"""The rule of `quantise` in machine code: bitwise the same results in a fraction of the time.

Torch would spend most of its time on conversions. Each block is searched for its largest magnitude, and then encoded
(`compiled_encode.py`).
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
"""The supported dtypes of weights, which machine code reads and writes as bits."""
_Ends = tuple[ir.Value, ir.Value]
"""The first column of a part of a row, and the column after its last."""
_SEARCHED = 64
"""Elements of a row that are searched at once for the largest magnitude."""
_ENCODED = 32
"""Elements of a row encoded at once."""
_SIDE_BY_SIDE = 2
"""Adjacent blocks that are searched and encoded together, row by row across all of them: longer rows use memory faster.
"""
SIDE_BY_SIDE_COLUMNS = _SIDE_BY_SIDE * BLOCK
_THREAD_ELEMENTS = 2**21
"""Minimum number of elements per thread: starting a thread takes a tenth of the time of quantising this many."""


def knows(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether these tensors are supported: bfloat16 or float32 weights, all on the CPU with contiguous rows."""
    tensors = (weight, codes, scales)
    return weight.dtype in WEIGHTS and all(each.is_cpu and each.stride(1) == 1 for each in tensors)


def quantise(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, power_of_two: bool) -> bool:
    """Write codes and scales as `quantise_into` does, with as many threads as torch would use.

    Returns False if a weight has no code; codes and scales are undefined then.
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
    """Compile the function of the arguments above; it returns the float32 bits of the largest magnitude."""
    build = Builder("quantise", [POINTER] * 3 + [BITS_64] * 5)
    weight, codes, scales, rows, columns, *strides = build.function.args
    quantisation = Quantisation(build, dtype, power_of_two=power_of_two)
    matrix = Matrix(weight, codes, scales, columns, *strides)
    with build.loop(constant(BITS_64, 0), rows, BLOCK) as top:
        bottom = build.smaller(build.add(top, constant(BITS_64, BLOCK)), rows)
        quantisation.row_of_blocks(matrix, (top, bottom))
    # Non-temporal stores must be visible to other threads before they are told that the work is done.
    build.fence("seq_cst")
    return build.compiled(quantisation.largest())


class Matrix(NamedTuple):
    """The addresses of a weight, its codes and its scales in a function, and their row strides in elements."""

    weight: ir.Value
    codes: ir.Value
    scales: ir.Value
    columns: ir.Value
    weight_stride: ir.Value
    codes_stride: ir.Value
    scales_stride: ir.Value


class CodesReader(Protocol):
    """Part of a function that reads codes, 64 at once, while they are in a register.

    It receives them row by row across several adjacent blocks, then across the next blocks.
    """

    def begin(self) -> None:
        """Called when a group of blocks begins."""

    def read(self, number: int, codes: ir.Value) -> None:
        """Receive the 64 codes at place `number` in a row of the blocks."""

    def end(self) -> None:
        """Called when the blocks have ended."""


class Quantisation:
    """The part of a function that quantises weights of one dtype; create it before the function's first loop."""

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
        """The float32 bits of the largest magnitude so far; if above `LARGEST_BITS`, it has no code."""
        return self._build.load(self._of_all, typ=BITS_32)

    def row_of_blocks(self, matrix: Matrix, ends: _Ends, reader: CodesReader | None = None) -> None:
        """Write codes and scales of the rows from `ends[0]`, where blocks begin, up to but excluding `ends[1]`.

        While some blocks are encoded, the next ones are searched, so that computation overlaps with memory accesses. A
        `reader` requires a processor that looks codes up, and a multiple of `SIDE_BY_SIDE_COLUMNS` columns.
        """
        build, zero, step = self._build, constant(BITS_64, 0), SIDE_BY_SIDE_COLUMNS
        middle = build.and_(matrix.columns, constant(BITS_64, -step))
        last = build.sub(middle, constant(BITS_64, step))
        with build.if_then(build.icmp_signed(">", middle, zero)):
            self._each_row(matrix, ends, searched=self._side_by_side(zero))
        with build.loop(zero, middle, step) as left:
            # The last blocks are searched once more while they are encoded, which is faster than a special case.
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
        """Return encoders for the blocks that were searched last, and write their scales."""
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
        # Halving a power of two decrements its exponent.
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
        """Search blocks while encoding others; `ahead` is the first column to prefetch, and the end of the columns."""
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
        """Prefetch the blocks after those being searched: hardware prefetchers do not follow rows so far apart."""
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
    """Update the largest magnitudes, as bits, with part of a row."""

    def work(column: ir.Value, lanes: int) -> None:
        bits = build.read(build.element(source, column, kind), vector(kind, lanes))
        magnitudes = build.and_(bits, constant(bits.type, 2 ** (kind.width - 1) - 1))
        build.keep_largest(of_block[0 if lanes > 1 else 1], magnitudes)

    build.across(*ends, _SEARCHED, work)


def _largest(build: Builder, of_block: tuple[ir.Value, ...]) -> ir.Value:
    """The float32 bits of a block's largest magnitude."""
    together, alone = (build.load(place, typ=place.allocated_type) for place in of_block)
    return float32_bits(build, build.larger(build.largest_lane(together), alone), 1)


class _Encoder(NamedTuple):
    """The columns of a block, and how its weights are encoded."""

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
        """Encode a row of a whole block, number `block` of the adjacent ones, and pass the codes to a reader."""
        for number in range(BLOCK // LOOKED_UP):
            column = build.add(self.columns[0], constant(BITS_64, number * LOOKED_UP))
            own = build.read(build.element(source, column, BITS_16), vector(BITS_16, LOOKED_UP))
            codes = self._codes(build, own)
            _write_line(build, build.element(target, column, BITS_8), codes)
            reader.read(block * BLOCK // LOOKED_UP + number, codes)

    def _codes(self, build: Builder, own: ir.Value) -> ir.Value:
        """Look up the codes of `LOOKED_UP` weights, or compute them if some cannot be looked up."""
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
    """Write 64 codes, bypassing the caches if they are an aligned cache line."""
    offset = build.and_(build.ptrtoint(to, BITS_64), constant(BITS_64, LINE_BYTES - 1))
    is_line = build.icmp_unsigned("==", offset, constant(BITS_64, 0))
    with build.if_else(is_line, likely=True) as (line, other):
        with line:
            build.write_past_caches(to, codes)
        with other:
            build.write(to, codes)
