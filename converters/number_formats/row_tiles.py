"""Splits matrices into tiles: rows that are quantised together, few enough to keep intermediate tensors small."""

from collections.abc import Iterator

from torch import Tensor

# Small enough for a processor's cache; on a GPU, large enough to amortise the start of an operation.
_HOST_ELEMENTS = 2**20
_DEVICE_ELEMENTS = 2**25


def row_tiles(weight: Tensor) -> Iterator[slice]:
    """Cut the rows of a matrix into ranges with few elements, or of a single row."""
    rows, columns = weight.shape
    elements = _HOST_ELEMENTS if weight.device.type == "cpu" else _DEVICE_ELEMENTS
    step = max(1, elements // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
