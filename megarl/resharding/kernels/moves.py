"""Moves: the rows that lie in a bucket and in this rank's tensors, as numbers that machine code reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

import numpy as np
import torch
from torch import Tensor

from megarl.resharding.kernels.planes import planes


class Column(IntEnum):
    """Columns of the table."""

    OFFSET_BYTES = 0
    """From the start of the bucket's memory."""
    LOCAL = auto()
    """Address of the first row in the tensor."""
    ROWS = auto()
    ROW_BYTES = auto()
    STRIDE_BYTES = auto()
    """From row to row of the tensor; in the bucket one follows the other."""


def is_known(dtype: torch.dtype, local: Tensor) -> bool:
    """Whether machine code moves a box between a bucket in `dtype` and a tensor: no conversion, no gaps in a row.

    Both are on the host.
    """
    dimensions = zip(reversed(local.shape), reversed(local.stride()), strict=True)
    return local.is_cpu and dtype == local.dtype and next((stride for size, stride in dimensions if size > 1), 1) == 1


@dataclass(frozen=True)
class Moves:
    """Moves between a bucket and tensors: of rows by machine code, and of pairs of tensors by torch."""

    arguments: tuple[int, int, int, int]
    """Address and length of the table, address and bytes of the memory."""
    packed: list[Tensor]
    local: list[Tensor]
    table: np.ndarray
    """The table itself, int64 [rows, columns], in the order of the memory."""

    @classmethod
    def of(cls, memory: Tensor, packed: Sequence[Tensor], local: Sequence[Tensor]) -> "Moves":
        """The moves between `packed`, views of `memory` in its order, and `local` tensors of the same shapes."""
        # Where nothing lies there is no address.
        pairs = [pair for pair in zip(packed, local, strict=True) if pair[0].numel()]
        start = memory.data_ptr()
        rows = [row for there, here in pairs if is_known(there.dtype, here) for row in _rows(start, there, here)]
        table = np.array(rows, np.int64).reshape(-1, len(Column))
        others = [(there, here) for there, here in pairs if not is_known(there.dtype, here)]
        arguments = table.ctypes.data, len(table), start, memory.numel()
        return cls(arguments, [there for there, _ in others], [here for _, here in others], table)


def _rows(start: int, packed: Tensor, local: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
    for plane in planes(local, packed):
        row_bytes, stride = plane.columns * plane.unit_bytes, plane.row_stride * plane.unit_bytes
        yield plane.packed - start, plane.local, plane.rows, row_bytes, stride
