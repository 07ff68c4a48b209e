"""The blocks of the format, and the tiles in which a matrix is processed."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from converters.layout import Shape

BLOCK = 128
"""Rows and columns of a block. Blocks at the lower and right edges of a matrix may be smaller."""
CODES = torch.float8_e4m3fn
LARGEST_CODE = 448.0
LARGEST_SCALE = 2.0**119
SMALLEST_MAGNITUDE = 1e-10
"""Lower limit of a block's largest magnitude in computing its scale, so that a block of zeros has a nonzero scale."""
SMALLEST_MAGNITUDE_OF_POWERS = 1e-4
"""The same limit for power-of-two scales."""
HALVED_UP_TO = 232.0
"""Quotients up to this value round to half of the largest code or less."""
LARGEST_WEIGHT = LARGEST_CODE * LARGEST_SCALE
"""Largest weight that can be encoded, 0.88 of the largest bfloat16."""
# Large enough to amortise the start of an operation, small enough for a processor's cache: 4 MiB in float32.
_TILE_ELEMENTS = 2**20
_TILE_COLUMNS = 8192


def scales_shape(shape: Shape) -> Shape:
    """The shape of the scales of a matrix of `shape`: one per block."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


@dataclass(frozen=True)
class Tile:
    """Part of a box: its `rows` and `columns`. It has `blocks` rows of blocks, each `height` rows high."""

    rows: slice
    columns: slice
    blocks: int
    height: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows of blocks, rows per block, columns."""
        return self.blocks, self.height, self.columns.stop - self.columns.start

    @property
    def elements(self) -> int:
        """Number of elements."""
        blocks, height, columns = self.shape
        return blocks * height * columns


def tiles(shape: Shape, row_start: int) -> Iterator[Tile]:
    """Cut a box of `shape`, which begins in row `row_start` of its matrix, into tiles.

    Each tile begins at a multiple of `BLOCK` columns of the box.
    """
    rows, columns = shape
    most_blocks = max(1, _TILE_ELEMENTS // (BLOCK * max(1, min(columns, _TILE_COLUMNS))))
    row = 0
    while row < rows:
        height = min(BLOCK - (row_start + row) % BLOCK, rows - row)
        blocks = min((rows - row) // BLOCK, most_blocks) if height == BLOCK else 1
        stop = row + blocks * height
        for column in range(0, columns, _TILE_COLUMNS):
            yield Tile(slice(row, stop), slice(column, min(column + _TILE_COLUMNS, columns)), blocks, height)
        row = stop


class Scratch:
    """Device memory reused for each tile. Not thread-safe."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._memory: dict[torch.dtype, torch.Tensor] = {}

    def like(self, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous, uninitialised tensor shaped like `tile`; the next call with this dtype overwrites it."""
        memory = self._memory.get(dtype)
        if memory is None or memory.numel() < tile.elements:
            memory = self._memory[dtype] = torch.empty(tile.elements, dtype=dtype, device=self._device)
        return memory[: tile.elements].view(tile.shape)
