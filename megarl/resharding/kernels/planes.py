"""Planes: boxes with any strides as rows and columns of units that a kernel copies, on a GPU or on the host."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from converters.layouts.strided import fewest_dimensions

_UNIT_BYTES = (8, 4, 2, 1)


@dataclass(frozen=True)
class Plane:
    """Rows and columns of a local tensor, by address and strides, and the address of the contiguous copy in the bucket.

    Sizes and strides count units of `unit_bytes`.

    Example: 64 rows of 128 bfloat16 out of rows of 4096: `rows=64, columns=32, row_stride=1024, column_stride=1,
    unit_bytes=8`.
    """

    local: int
    packed: int
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    unit_bytes: int


def planes(local: Tensor, packed: Tensor) -> Iterator[Plane]:
    """The planes of `local` and of `packed`, a contiguous tensor of the same shape; units are elements of `local`."""
    fewest = fewest_dimensions(local.shape, local.stride())
    dimensions = [(1, 0)] * (2 - len(fewest)) + fewest
    (rows, row_stride), (columns, column_stride) = dimensions[-2:]
    outer = dimensions[:-2]
    for number, index in enumerate(itertools.product(*(range(size) for size, _ in outer))):
        start = sum(at * stride for at, (_, stride) in zip(index, outer, strict=True))
        yield Plane(
            local.data_ptr() + start * local.element_size(),
            packed.data_ptr() + number * rows * columns * packed.element_size(),
            rows,
            columns,
            row_stride,
            column_stride,
            local.element_size(),
        )


def in_largest_units(plane: Plane) -> Plane:
    """The same plane in units of several elements, if these are contiguous and aligned at both ends."""
    return next(
        Plane(
            plane.local,
            plane.packed,
            plane.rows,
            plane.columns // elements,
            plane.row_stride // elements,
            plane.column_stride,
            unit_bytes,
        )
        for unit_bytes in _UNIT_BYTES
        if (elements := unit_bytes // plane.unit_bytes) == 1
        or (
            elements > 1
            and plane.column_stride == 1
            and plane.columns % elements == 0
            and (plane.rows == 1 or plane.row_stride % elements == 0)
            and plane.local % unit_bytes == plane.packed % unit_bytes == 0
        )
    )
