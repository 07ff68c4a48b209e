"""The rows that lie in a bucket and in this rank's tensors, as numbers that machine code reads."""

from collections.abc import Iterator, Sequence
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


def table_of_rows(memory: Tensor, packed: Sequence[Tensor], local: Sequence[Tensor]) -> np.ndarray:
    """The table of what machine code moves, int64 [moves, columns], in the order of the memory.

    `packed` are views of `memory` in its order, `local` tensors of the same shapes; pairs that are not known to it are
    left out.
    """
    # Where nothing lies there is no address.
    pairs = [(there, here) for there, here in zip(packed, local, strict=True) if here.numel()]
    start = memory.data_ptr()
    rows = [row for there, here in pairs if is_known(there.dtype, here) for row in _rows(start, there, here)]
    return np.array(rows, np.int64).reshape(-1, len(Column))


def _rows(start: int, packed: Tensor, local: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
    for plane in planes(local, packed):
        row_bytes, stride = plane.columns * plane.unit_bytes, plane.row_stride * plane.unit_bytes
        yield plane.packed - start, plane.local, plane.rows, row_bytes, stride
