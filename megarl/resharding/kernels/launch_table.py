"""Launch table: a tensor that tells one launch of the GPU kernel which boxes of a block to move."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

import torch
from torch import Tensor

from converters.fp8 import BLOCK
from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0, INT8_CHANNEL, MXFP8
from converters.number_formats.number_format import WHOLE_ROW
from megarl.resharding.kernels.planes import Plane, in_largest_units, planes
from megarl.resharding.kernels.quantised import Quantised

COPY_UNITS = 2048
"""Units that one Triton program copies: 16 KiB in the largest units."""
SLAB_ROWS = 16
"""Rows of a matrix that a program holds in registers at once."""


class Kind(IntEnum):
    """The work on a plane; the first four are copies in units of that many bytes.

    QUANTISED_WIDE is for contiguous, aligned rows of bfloat16.
    """

    COPY_1 = 0
    COPY_2 = auto()
    COPY_4 = auto()
    COPY_8 = auto()
    QUANTISED_BFLOAT16 = auto()
    QUANTISED_FLOAT32 = auto()
    QUANTISED_WIDE = auto()


class CodeFormat(IntEnum):
    """The format to which a launch quantises its matrices."""

    NONE = 0
    BLOCK_FP8 = auto()
    MXFP8 = auto()
    INT8_CHANNEL = auto()


_COPIES = {1: Kind.COPY_1, 2: Kind.COPY_2, 4: Kind.COPY_4, 8: Kind.COPY_8}
_CODE_FORMATS = {
    FP8_BLOCK.name: CodeFormat.BLOCK_FP8,
    FP8_BLOCK_UE8M0.name: CodeFormat.BLOCK_FP8,
    MXFP8.name: CodeFormat.MXFP8,
    INT8_CHANNEL.name: CodeFormat.INT8_CHANNEL,
}
_TILES = {
    CodeFormat.BLOCK_FP8: (BLOCK, BLOCK),
    CodeFormat.MXFP8: (BLOCK, BLOCK),
    CodeFormat.INT8_CHANNEL: (SLAB_ROWS, WHOLE_ROW),
}
"""Rows and columns of a matrix that one program works on."""
_WIDE_BYTES, _WIDE_ELEMENTS = 16, 8
"""Alignment for two loads of four bfloat16 weights, which become eight codes."""
_QUANTISED = {torch.bfloat16: Kind.QUANTISED_BFLOAT16, torch.float32: Kind.QUANTISED_FLOAT32}


class Column(IntEnum):
    """Columns of a launch table."""

    KIND = 0
    FIRST_TILE = auto()
    """Index of the plane's first program in the launch."""
    LOCAL = auto()
    """Address of the local plane."""
    PACKED = auto()
    """Address of the plane in the bucket."""
    OFFSET_BYTES = auto()
    """Offset of `PACKED` in the block's memory."""
    ROWS = auto()
    COLUMNS = auto()
    ROW_STRIDE = auto()
    """Distance between rows of the local plane, in units; likewise the next."""
    COLUMN_STRIDE = auto()
    SCALES = auto()
    """Address of the scales, if there are any."""
    SCALES_OFFSET_BYTES = auto()
    POWER_OF_TWO = auto()


@dataclass(frozen=True)
class _Work:
    """A plane, and the work on it by `tiles` programs."""

    kind: Kind
    plane: Plane
    tiles: int
    quantised: Quantised | None = None


class LaunchTable:
    """The planes of a block, on its device: one row per plane. Planes are cut into tiles, one per program.

    A box has fewer than 2^31 elements. `conversions` are pairs (bucket, local) of tensors between whose dtypes the
    kernels do not convert, and `in_torch` are matrices that are quantised to another format than `code_format`: torch
    handles both, and the launch only checksums them.
    """

    def __init__(
        self, memory: Tensor, packed: Sequence[Tensor], local: Sequence[Tensor], quantised: Sequence[Quantised]
    ) -> None:
        pairs = list(zip(packed, local, strict=True))
        self.conversions = [(there, here) for there, here in pairs if there.dtype != here.dtype]
        self._work = [work for there, here in pairs for work in _copies(there, here)]
        self.code_format = next(filter(None, map(_code_format, quantised)), CodeFormat.NONE)
        self.in_torch = [each for each in quantised if _code_format(each) != self.code_format or not self.code_format]
        for each in self.in_torch:
            self._work += [*_copies(each.codes, each.codes), *_copies(each.scales, each.scales)]
        self._work += [
            _quantised(each, self.code_format)
            for each in quantised
            if self.code_format and _code_format(each) == self.code_format
        ]
        counts = torch.tensor([work.tiles for work in self._work], dtype=torch.int64)
        self._first = (counts.cumsum(0) - counts).tolist()
        self.tiles = int(counts.sum())
        rows = [_row(work, first, memory.data_ptr()) for work, first in zip(self._work, self._first, strict=True)]
        self.rows = torch.tensor(rows, dtype=torch.int64).view(-1, len(Column)).to(memory.device)
        # Affordable: 4 bytes per tile of up to 16 KiB.
        numbers = torch.arange(len(counts), dtype=torch.int32)
        self.row_of_tile = numbers.repeat_interleave(counts).to(memory.device)

    def matrix_of_tile(self, tile: int) -> Quantised:
        """The matrix that the program of this tile works on."""
        quantised = self._work[int(self.row_of_tile[tile])].quantised
        assert quantised is not None
        return quantised


def _code_format(matrix: Quantised) -> CodeFormat:
    known = matrix.local.dtype in _QUANTISED
    return _CODE_FORMATS.get(matrix.number_format.name, CodeFormat.NONE) if known else CodeFormat.NONE


def _copies(packed: Tensor, local: Tensor) -> Iterator[_Work]:
    if not local.numel():
        return
    # Other dtypes: torch converts, and the kernel copies the bucket onto itself, only to checksum it.
    for plane in planes(local if local.dtype == packed.dtype else packed, packed):
        cut = in_largest_units(plane)
        yield _Work(_COPIES[cut.unit_bytes], cut, -(-cut.rows * cut.columns // COPY_UNITS))


def _quantised(each: Quantised, code_format: CodeFormat) -> _Work:
    (rows, columns), (row_stride, column_stride) = each.local.shape, each.local.stride()
    size = each.local.element_size()
    plane = Plane(each.local.data_ptr(), each.codes.data_ptr(), rows, columns, row_stride, column_stride, size)
    tiles = math.prod(-(-length // step) for length, step in zip((rows, columns), _TILES[code_format], strict=True))
    is_wide = code_format == CodeFormat.BLOCK_FP8 and each.local.dtype == torch.bfloat16 and _is_wide(plane)
    return _Work(Kind.QUANTISED_WIDE if is_wide else _QUANTISED[each.local.dtype], plane, tiles, each)


def _is_wide(plane: Plane) -> bool:
    in_rows = plane.column_stride == 1 and (plane.rows == 1 or plane.row_stride % _WIDE_ELEMENTS == 0)
    aligned = plane.local % _WIDE_BYTES == plane.packed % _WIDE_ELEMENTS == 0
    return in_rows and aligned and plane.columns % _WIDE_ELEMENTS == 0


def _row(work: _Work, first_tile: int, memory: int) -> list[int]:
    plane, scales = work.plane, work.quantised.scales.data_ptr() if work.quantised else 0
    values = {
        Column.KIND: work.kind,
        Column.FIRST_TILE: first_tile,
        Column.LOCAL: plane.local,
        Column.PACKED: plane.packed,
        Column.OFFSET_BYTES: plane.packed - memory,
        Column.ROWS: plane.rows,
        Column.COLUMNS: plane.columns,
        Column.ROW_STRIDE: plane.row_stride,
        Column.COLUMN_STRIDE: plane.column_stride,
        Column.SCALES: scales,
        Column.SCALES_OFFSET_BYTES: scales - memory if scales else 0,
        Column.POWER_OF_TWO: work.quantised is not None and work.quantised.number_format.name == FP8_BLOCK_UE8M0.name,
    }
    return [int(values[column]) for column in Column]
