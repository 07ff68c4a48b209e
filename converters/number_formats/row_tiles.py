"""Tiles: the rows of a matrix that are quantised at once, so that what is in between stays small."""

from collections.abc import Iterator

from torch import Tensor

# Small enough for a processor's cache; on a GPU large beside the cost of starting an operation.
_HOST_ELEMENTS = 2**20
_DEVICE_ELEMENTS = 2**25


def row_tiles(weight: Tensor) -> Iterator[slice]:
    """Cut the rows of a matrix into runs of few elements, or of one row."""
    rows, columns = weight.shape
    elements = _HOST_ELEMENTS if weight.device.type == "cpu" else _DEVICE_ELEMENTS
    step = max(1, elements // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
