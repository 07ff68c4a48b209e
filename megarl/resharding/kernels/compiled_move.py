"""Rows between a bucket and this rank's tensors in machine code: each byte is read once, written, and checksummed."""

from functools import cache
from typing import Literal, TypeAlias

import numpy as np
from llvmlite import ir
from torch import Tensor

from converters.machine_code import BITS_8, BITS_32, BITS_64, POINTER, Builder, Function, constant, vector
from megarl.resharding.kernels.crc32 import VECTORS, Crc32
from megarl.resharding.kernels.moves import Column

Way: TypeAlias = Literal["pack", "unpack"]
_LANES = 8
"""64-bit lanes of the vectors that are moved where no checksum is taken."""


def move(way: Way, rows: np.ndarray, memory: Tensor) -> None:
    """Copy the `rows` of a table between `memory`, part of a bucket, and tensors."""
    _function(way, 0)(*_arguments(rows, memory), 0)


def move_with_checksum(way: Way, rows: np.ndarray, memory: Tensor, before: int, lanes: int) -> int:
    """As `move`; the CRC-32 of what lies in the memory then, continued from `before`, by vectors of `lanes`."""
    return _function(way, lanes)(*_arguments(rows, memory), before)


def _arguments(rows: np.ndarray, memory: Tensor) -> tuple[int, int, int, int]:
    return rows.ctypes.data, len(rows), memory.data_ptr(), memory.numel()


@cache
def _function(way: Way, lanes: int) -> Function:
    """The function of a table, its length, the bucket's memory, its length, and the checksum of what comes before.

    A checksum is taken by vectors of so many lanes, and none with 0.
    """
    build = Builder(way, [POINTER, BITS_64, POINTER, BITS_64, BITS_64])
    table, count, memory, nbytes, before = build.function.args
    crc = Crc32(build, before, lanes) if lanes else None
    taken = build.variable(constant(BITS_64, 0))
    """So many bytes of the memory are in the checksum."""

    def take_up_to(end: ir.Value) -> None:
        """Have in the checksum whole vectors of what was not taken on its way: gaps, and rows of odd sizes."""
        if crc is not None:
            build.store(crc.add_memory(memory, build.load(taken, typ=BITS_64), end), taken)

    with build.loop(constant(BITS_64, 0), count) as number:
        entry = build.element(table, number, ir.ArrayType(BITS_64, len(Column)))
        offset, local, rows, row_bytes, stride = (
            build.read(build.element(entry, constant(BITS_64, column), BITS_64), BITS_64) for column in Column
        )
        with build.loop(constant(BITS_64, 0), rows) as row:
            start = build.add(offset, build.mul(row, row_bytes))
            take_up_to(start)
            here = build.inttoptr(build.add(local, build.mul(row, stride)), POINTER)
            there = build.element(memory, start, BITS_8)
            ends = (here, there) if way == "pack" else (there, here)
            is_next = constant(ir.IntType(1), 1)
            if crc is not None:
                is_next = build.icmp_unsigned("==", build.load(taken, typ=BITS_64), start)
            moved = build.select(is_next, _whole(build, row_bytes, lanes or _LANES), constant(BITS_64, 0))
            _copy_vectors(build, ends, moved, crc, lanes or _LANES)
            build.store(build.add(build.load(taken, typ=BITS_64), moved), taken)
            with build.if_then(build.icmp_unsigned("<", moved, row_bytes), likely=False):
                source, target = (build.element(end, moved, BITS_8) for end in ends)
                build.copy_bytes(target, source, build.sub(row_bytes, moved))
    # What was written past the caches is to be seen by whoever is told of it.
    build.fence("seq_cst")
    take_up_to(nbytes)
    return build.compiled(
        constant(BITS_32, 0) if crc is None else crc.result(memory, build.load(taken, typ=BITS_64), nbytes)
    )


def _whole(build: Builder, nbytes: ir.Value, lanes: int) -> ir.Value:
    """The bytes of whole vectors."""
    return build.and_(nbytes, constant(BITS_64, -8 * lanes))


def _copy_vectors(
    build: Builder, ends: tuple[ir.Value, ir.Value], nbytes: ir.Value, crc: Crc32 | None, lanes: int
) -> None:
    """Copy whole vectors from one end to the other, past the caches where they are aligned."""
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
