"""Tiles of a GPU kernel: the addresses of elements by a row of the launch table, and their part of the checksum."""

import triton
import triton.language as tl

from converters.fp8.blocks import BLOCK
from megarl.resharding.kernels.launch_table import SLAB_ROWS, Column

ROW = tl.constexpr(len(Column))
KIND = tl.constexpr(int(Column.KIND))
FIRST_TILE = tl.constexpr(int(Column.FIRST_TILE))
LOCAL_PLANE = tl.constexpr(int(Column.LOCAL))
PACKED = tl.constexpr(int(Column.PACKED))
OFFSET_BYTES = tl.constexpr(int(Column.OFFSET_BYTES))
ROWS = tl.constexpr(int(Column.ROWS))
COLUMNS = tl.constexpr(int(Column.COLUMNS))
ROW_STRIDE = tl.constexpr(int(Column.ROW_STRIDE))
COLUMN_STRIDE = tl.constexpr(int(Column.COLUMN_STRIDE))
SCALES = tl.constexpr(int(Column.SCALES))
SCALES_OFFSET_BYTES = tl.constexpr(int(Column.SCALES_OFFSET_BYTES))
SQUARE = tl.constexpr(BLOCK)
"""Rows and columns that one program works on."""
SLAB = tl.constexpr(SLAB_ROWS)
"""Rows that a program holds in registers at once."""


@triton.jit
def slab_of(row, tile, slab, LOCAL: tl.constexpr):
    """Some rows of a square: their addresses in the local plane, their positions in the bucket, and a mask."""
    columns = tl.load(row + COLUMNS).to(tl.int32)
    across = (columns + SQUARE - 1) // SQUARE
    x = (tile // across) * SQUARE + slab + tl.arange(0, SLAB)[:, None]
    y = (tile % across) * SQUARE + tl.arange(0, SQUARE)[None, :]
    inside = (x < tl.load(row + ROWS).to(tl.int32)) & (y < columns)
    return tl.load(row + LOCAL_PLANE).to(tl.pointer_type(LOCAL)) + steps(row, x, y), x * columns + y, inside


@triton.jit
def steps(row, x, y):
    """The offset, in elements, of row `x` and column `y` of the local plane."""
    return x.to(tl.int64) * tl.load(row + ROW_STRIDE) + y.to(tl.int64) * tl.load(row + COLUMN_STRIDE)


@triton.jit
def sum_of(units, offset_bytes, BYTES: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    """The contribution of `units`, signed integers at `offset_bytes` of the block's memory, to the checksum."""
    total = tl.full((), 0, tl.int64)
    if WITH_CHECKSUM:
        position = (offset_bytes >> 2) + 1
        wide = units.to(tl.int64)
        if BYTES == 8:
            total = tl.sum(((wide << 32) >> 32) * position + (wide >> 32) * (position + 1))
        elif BYTES == 4:
            total = tl.sum(wide * position)
        else:
            # Words are signed: only the last bytes of a word keep their sign, the others count as unsigned.
            lane = offset_bytes & 3
            unsigned = wide & ((1 << (8 * BYTES)) - 1)
            total = tl.sum((tl.where(lane == 4 - BYTES, wide, unsigned) << (8 * lane)) * position)
    return total
