"""Moves between a bucket and tensors in machine code: each byte is read once, written or quantised, and checksummed."""

import ctypes
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

from llvmlite import ir

from converters.fp8 import BLOCK
from converters.fp8.compiled_encode import LARGEST_BITS
from converters.fp8.compiled_quantise import SIDE_BY_SIDE_COLUMNS, Matrix, Quantisation
from converters.machine_code import BITS_8, BITS_32, BITS_64, POINTER, Builder, Function, constant, vector
from megarl.resharding.kernels.crc32 import VECTORS, Crc32
from megarl.resharding.kernels.moves import NO_SCALES, Column, Moves, Rule

Way: TypeAlias = Literal["pack", "unpack"]
_LANES = 8
"""64-bit lanes of the vectors that are moved when no checksum is computed."""


def move(way: Way, moves: Moves) -> None:
    """Copy rows between a bucket's memory and tensors."""
    _function(way, 0)(*moves.arguments, 0)


def move_with_checksum(way: Way, moves: Moves, before: int, lanes: int) -> int:
    """Copy as `move`; return the CRC-32 of the bucket's memory, continued from `before`, by vectors of `lanes`."""
    return _function(way, lanes)(*moves.arguments, before)


def pack_and_quantise(moves: Moves, rule: Rule, before: int, lanes: int) -> tuple[int, bool]:
    """Pack as `move_with_checksum`, and quantise the table's matrices.

    Returns the checksum, and whether every weight could be quantised.

    With `lanes` 0 no checksum is computed.
    """
    largest = ctypes.c_uint32()
    total = _function("pack", lanes, rule)(*moves.arguments, before, ctypes.addressof(largest))
    return total, largest.value <= LARGEST_BITS


@cache
def _function(way: Way, lanes: int, rule: Rule | None = None) -> Function:
    """Compile the function of (table, its length, bucket memory, its length, checksum of the preceding bytes).

    It computes the checksum by vectors of `lanes` 64-bit lanes, or none with 0. With a rule, it quantises matrices by
    it, and takes as its last argument the address to which it writes the bits of the largest magnitude.
    """
    build = Builder(way, [POINTER, BITS_64, POINTER, BITS_64, BITS_64] + [POINTER] * (rule is not None))
    table, count, memory, nbytes, before, *largest = build.function.args
    crc = Crc32(build, before, lanes) if lanes else None
    written = _Written(build, memory, crc)
    quantisation = Quantisation(build, rule.weights, power_of_two=rule.power_of_two) if rule else None
    sums = _SumsOfColumns.of(build, crc) if crc and quantisation and quantisation.looks_up else None
    with build.loop(constant(BITS_64, 0), count) as number:
        entry = build.element(table, number, ir.ArrayType(BITS_64, len(Column)))
        row = _Row(*(build.read(build.element(entry, constant(BITS_64, at), BITS_64), BITS_64) for at in Column))
        if quantisation is None:
            _move_rows(written, row, way, lanes or _LANES)
        else:
            with build.if_else(build.icmp_signed("==", row.scales, constant(BITS_64, NO_SCALES))) as (plain, matrix):
                with plain:
                    _move_rows(written, row, way, lanes or _LANES)
                with matrix:
                    _quantise_rows(written, row, quantisation, sums)
    if quantisation is not None:
        build.write(largest[0], quantisation.largest())
    # Non-temporal stores must be visible before anyone is told that the data is there.
    build.fence("seq_cst")
    return build.compiled(written.checksum(nbytes))


class _Row(NamedTuple):
    """A row of the table, as values in the generated function."""

    offset: ir.Value
    local: ir.Value
    rows: ir.Value
    row_bytes: ir.Value
    stride: ir.Value
    scales: ir.Value
    row_low: ir.Value
    row_high: ir.Value
    block_low: ir.Value
    block_high: ir.Value
    last_low: ir.Value
    last_high: ir.Value


class _Written:
    """Generates the code that keeps the checksum of the bucket's memory, if there is one."""

    def __init__(self, build: Builder, memory: ir.Value, crc: Crc32 | None) -> None:
        self.build, self.memory, self.crc = build, memory, crc
        self.taken = build.variable(constant(BITS_64, 0))
        """Number of bytes of the memory that are in the checksum so far."""

    def take_up_to(self, end: ir.Value) -> None:
        """Add whole vectors of memory that was not checksummed while it was moved: gaps, codes, rows of odd sizes."""
        if self.crc is not None:
            taken = self.build.load(self.taken, typ=BITS_64)
            self.build.store(self.crc.add_memory(self.memory, taken, end), self.taken)

    def checksum(self, nbytes: ir.Value) -> ir.Value:
        """The checksum of the whole memory; 0 without one."""
        if self.crc is None:
            return constant(BITS_32, 0)
        self.take_up_to(nbytes)
        return self.crc.result(self.memory, self.build.load(self.taken, typ=BITS_64), nbytes)


def _move_rows(written: _Written, row: _Row, way: Way, lanes: int) -> None:
    build, crc = written.build, written.crc
    with build.loop(constant(BITS_64, 0), row.rows) as number:
        start = build.add(row.offset, build.mul(number, row.row_bytes))
        written.take_up_to(start)
        here = build.inttoptr(build.add(row.local, build.mul(number, row.stride)), POINTER)
        there = build.element(written.memory, start, BITS_8)
        ends = (here, there) if way == "pack" else (there, here)
        is_next = constant(ir.IntType(1), 1)
        if crc is not None:
            is_next = build.icmp_unsigned("==", build.load(written.taken, typ=BITS_64), start)
        moved = build.select(is_next, _whole(build, row.row_bytes, lanes), constant(BITS_64, 0))
        _copy_vectors(build, ends, moved, crc, lanes)
        build.store(build.add(build.load(written.taken, typ=BITS_64), moved), written.taken)
        with build.if_then(build.icmp_unsigned("<", moved, row.row_bytes), likely=False):
            source, target = (build.element(end, moved, BITS_8) for end in ends)
            build.copy_bytes(target, source, build.sub(row.row_bytes, moved))


def _quantise_rows(written: _Written, row: _Row, quantisation: Quantisation, sums: "_SumsOfColumns | None") -> None:
    """Write the codes and scales of a matrix. Codes are checksummed in registers if possible, else from memory."""
    build, zero, size = written.build, constant(BITS_64, 0), constant(BITS_64, BLOCK)
    columns = row.row_bytes
    blocks = build.udiv(build.add(columns, constant(BITS_64, BLOCK - 1)), size)
    width = constant(BITS_64, quantisation.weight_bytes)
    matrix = Matrix(
        build.inttoptr(row.local, POINTER),
        build.element(written.memory, row.offset, BITS_8),
        build.element(written.memory, row.scales, BITS_8),
        columns,
        weight_stride=build.udiv(row.stride, width),
        codes_stride=columns,
        scales_stride=blocks,
    )

    def row_of_blocks(top: ir.Value) -> tuple[ir.Value, ir.Value]:
        return top, build.smaller(build.add(top, size), row.rows)

    def in_memory() -> None:
        with build.loop(zero, row.rows, BLOCK) as top:
            ends = row_of_blocks(top)
            quantisation.row_of_blocks(matrix, ends)
            written.take_up_to(build.add(row.offset, build.mul(ends[1], columns)))

    if sums is None:
        in_memory()
        return
    in_steps = build.icmp_unsigned("==", build.and_(columns, constant(BITS_64, SIDE_BY_SIDE_COLUMNS - 1)), zero)
    is_next = build.icmp_unsigned("==", build.load(written.taken, typ=BITS_64), row.offset)
    with build.if_else(build.and_(in_steps, is_next)) as (in_registers, other):
        with in_registers:
            with build.loop(zero, row.rows, BLOCK) as top:
                ends = row_of_blocks(top)
                sums.skip_to_last_row(row, ends[1])
                quantisation.row_of_blocks(matrix, ends, sums)
            build.store(build.add(row.offset, build.mul(row.rows, columns)), written.taken)
        with other:
            in_memory()


class _SumsOfColumns:
    """Checksums codes in registers, where they come in another order than in memory.

    A CRC is linear: the sum over a row of blocks is folded column by column, by the distance of two rows, into the
    vectors of its last row.
    """

    def __init__(self, build: Builder, crc: Crc32) -> None:
        self._build, self._crc = build, crc
        self._sums = [build.variable(constant(crc.vector, 0)) for _ in range(VECTORS)]
        self._powers: tuple[ir.Value, ir.Value] | None = None

    @classmethod
    def of(cls, build: Builder, crc: Crc32) -> "_SumsOfColumns | None":
        """None if the columns that are quantised side by side are not exactly one step of the checksum."""
        return cls(build, crc) if crc.step_bytes == SIDE_BY_SIDE_COLUMNS else None

    def skip_to_last_row(self, row: _Row, bottom: ir.Value) -> None:
        """Before a row of blocks, advance the checksum of all earlier bytes to the position of its last row."""
        build = self._build
        is_last = build.icmp_signed("==", bottom, row.rows)
        low = build.select(is_last, row.last_low, row.block_low)
        self._crc.skip((low, build.select(is_last, row.last_high, row.block_high)))
        self._powers = row.row_low, row.row_high

    def begin(self) -> None:
        """See `CodesReader.begin`."""
        for place in self._sums:
            self._build.store(constant(place.allocated_type, 0), place)

    def read(self, number: int, codes: ir.Value) -> None:
        """See `CodesReader.read`."""
        assert self._powers is not None
        place = self._sums[number]
        above = self._build.load(place, typ=self._crc.vector)
        here = self._build.bitcast(codes, self._crc.vector)
        self._build.store(self._crc.after(above, self._powers, here), place)

    def end(self) -> None:
        """See `CodesReader.end`."""
        self._crc.add([self._build.load(place, typ=self._crc.vector) for place in self._sums])


def _whole(build: Builder, nbytes: ir.Value, lanes: int) -> ir.Value:
    """Round `nbytes` down to whole vectors."""
    return build.and_(nbytes, constant(BITS_64, -8 * lanes))


def _copy_vectors(
    build: Builder, ends: tuple[ir.Value, ir.Value], nbytes: ir.Value, crc: Crc32 | None, lanes: int
) -> None:
    """Copy whole vectors from one end to the other, by non-temporal stores where the target is aligned."""
    source, target = ends
    kind = vector(BITS_64, lanes)
    size, zero = 8 * lanes, constant(BITS_64, 0)
    unaligned = build.and_(build.ptrtoint(target, BITS_64), constant(BITS_64, size - 1))
    past_caches = build.select(build.icmp_unsigned("==", unaligned, zero), nbytes, zero)
    in_steps = _whole(build, past_caches, VECTORS * lanes)
    rest_in_steps = build.add(past_caches, _whole(build, build.sub(nbytes, past_caches), VECTORS * lanes))
    for start, stop, count, write in (
        (zero, in_steps, VECTORS, build.write_past_caches),
        (in_steps, past_caches, 1, build.write_past_caches),
        (past_caches, rest_in_steps, VECTORS, build.write),
        (rest_in_steps, nbytes, 1, build.write),
    ):
        with build.loop(start, stop, count * size) as at:
            first = build.element(source, at, BITS_8)
            vectors = [build.read(build.element(first, constant(BITS_64, n), kind), kind) for n in range(count)]
            for n, each in enumerate(vectors):
                write(build.element(build.element(target, at, BITS_8), constant(BITS_64, n), kind), each)
            if crc is not None:
                crc.add(vectors)
