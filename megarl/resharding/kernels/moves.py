"""Tables of rows that machine code moves between a bucket and this rank's tensors, and of matrices it quantises."""

from collections.abc import Iterator, Sequence
from enum import IntEnum, auto
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from converters.fp8 import BLOCK
from converters.fp8.compiled_quantise import knows
from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0
from megarl.resharding.kernels.crc32 import powers_of
from megarl.resharding.kernels.planes import planes
from megarl.resharding.kernels.quantised import Quantised

_POWERS_OF_TWO = {FP8_BLOCK.name: False, FP8_BLOCK_UE8M0.name: True}
"""Supported number formats -> whether their scales are powers of two."""
NO_SCALES = -1
_NO_POWERS = (0,) * 6


class Column(IntEnum):
    """Columns of the table."""

    OFFSET_BYTES = 0
    """Offset in the bucket's memory."""
    LOCAL = auto()
    """Address of the first row in the tensor."""
    ROWS = auto()
    ROW_BYTES = auto()
    STRIDE_BYTES = auto()
    """Distance between rows of the tensor; in the bucket they are contiguous."""
    SCALES_BYTES = auto()
    """Offset of the scales in the memory if the row is a matrix to quantise, with codes of one byte; else `NO_SCALES`.
    """
    ROW_LOW = auto()
    """The multiplier that shifts a checksum by one row of codes, from `crc32.powers_of`; so are the following ones."""
    ROW_HIGH = auto()
    BLOCK_LOW = auto()
    """Shifts from the first row of a row of blocks to its last row."""
    BLOCK_HIGH = auto()
    LAST_LOW = auto()
    """The same for the last row of blocks, which may have fewer rows."""
    LAST_HIGH = auto()


class Moves(NamedTuple):
    """A table of rows and the bucket's memory, as arguments of machine code: built once, used in every refit.

    Example: `Moves.of(rows, memory)` of 3 rows and 1 MiB: `arguments` (140245101125632, 3, 140245099028480, 1048576).
    """

    rows: np.ndarray
    """int64 [moves, columns]."""
    memory: Tensor
    arguments: tuple[int, int, int, int]
    """Address and length of the table, address and bytes of the memory."""

    @classmethod
    def of(cls, rows: np.ndarray, memory: Tensor) -> "Moves":
        """Build the arguments; keeps the table and the memory alive."""
        return cls(rows, memory, (rows.ctypes.data, len(rows), memory.data_ptr(), memory.numel()))


class Rule(NamedTuple):
    """How machine code quantises the matrices of a table.

    Example: `Rule(torch.bfloat16, power_of_two=False)`.
    """

    weights: torch.dtype
    power_of_two: bool


def is_known(dtype: torch.dtype, local: Tensor) -> bool:
    """Whether machine code can move a box between a bucket in `dtype` and a tensor: same dtype, contiguous rows.

    Both are on the host.
    """
    dimensions = zip(reversed(local.shape), reversed(local.stride()), strict=True)
    return local.is_cpu and dtype == local.dtype and next((stride for size, stride in dimensions if size > 1), 1) == 1


def rule_of(matrix: Quantised) -> Rule | None:
    """How machine code quantises a matrix; None if it does not support the format or dtype, or the rows are strided."""
    power_of_two = _POWERS_OF_TWO.get(matrix.number_format.name)
    if power_of_two is None or not knows(matrix.local, matrix.codes, matrix.scales):
        return None
    return Rule(matrix.local.dtype, power_of_two)


def table_of_rows(memory: Tensor, packed: Sequence[Tensor], local: Sequence[Tensor]) -> np.ndarray:
    """The table of what machine code moves, int64 [moves, columns], in memory order.

    `packed` are views of `memory` in order, `local` tensors of the same shapes. Pairs that machine code does not
    support are left out.
    """
    # Empty tensors have no address.
    pairs = [(there, here) for there, here in zip(packed, local, strict=True) if here.numel()]
    start = memory.data_ptr()
    rows = [row for there, here in pairs if is_known(there.dtype, here) for row in _rows(start, there, here)]
    return np.array(rows, np.int64).reshape(-1, len(Column))


def with_matrices(rows: np.ndarray, memory: Tensor, matrices: Sequence[Quantised]) -> np.ndarray:
    """Merge `rows` with matrices to quantise, all of the same rule, in memory order."""
    start = memory.data_ptr()
    own = np.array([_row(start, matrix) for matrix in matrices], np.int64).reshape(-1, len(Column))
    every = np.concatenate([rows, own])
    return every[np.argsort(every[:, Column.OFFSET_BYTES], kind="stable")]


def _rows(start: int, packed: Tensor, local: Tensor) -> Iterator[tuple[int, ...]]:
    for plane in planes(local, packed):
        row_bytes, stride = plane.columns * plane.unit_bytes, plane.row_stride * plane.unit_bytes
        yield plane.packed - start, plane.local, plane.rows, row_bytes, stride, NO_SCALES, *_NO_POWERS


def _row(start: int, matrix: Quantised) -> tuple[int, ...]:
    (rows, columns), local = matrix.codes.shape, matrix.local
    stride = local.stride(0) * local.element_size()
    scales = matrix.scales.data_ptr() - start
    distances = columns, columns * (BLOCK - 1), columns * ((rows - 1) % BLOCK)
    powers = [power for distance in distances for power in powers_of(distance)]
    return matrix.codes.data_ptr() - start, local.data_ptr(), rows, columns, stride, scales, *powers
