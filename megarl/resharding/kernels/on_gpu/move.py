"""The kernel that moves a block on a GPU: a program moves one tile of one plane of the launch table.

All conversions between number formats work on bits, so they give the same result on every GPU and under Triton's
interpreter, and NaNs keep their payload.
"""

import triton
import triton.language as tl

from megarl.resharding.kernels.launch_table import COPY_UNITS, CodeFormat, Kind
from megarl.resharding.kernels.on_gpu import block_fp8, block_fp8_wide, int8_channel, mxfp8
from megarl.resharding.kernels.on_gpu.tiles import (
    COLUMNS,
    FIRST_TILE,
    KIND,
    LOCAL_PLANE,
    OFFSET_BYTES,
    PACKED,
    ROW,
    ROWS,
    steps,
    sum_of,
)

SUMS = 256
"""Accumulators for the programs' parts of the checksum: with a single one, all programs would contend for it."""

_COPY_1 = tl.constexpr(int(Kind.COPY_1))
_COPY_2 = tl.constexpr(int(Kind.COPY_2))
_COPY_4 = tl.constexpr(int(Kind.COPY_4))
_COPY_8 = tl.constexpr(int(Kind.COPY_8))
_BFLOAT16 = tl.constexpr(int(Kind.QUANTISED_BFLOAT16))
_WIDE = tl.constexpr(int(Kind.QUANTISED_WIDE))
_FLOAT32 = tl.constexpr(int(Kind.QUANTISED_FLOAT32))
_BLOCK_FP8 = tl.constexpr(int(CodeFormat.BLOCK_FP8))
_MXFP8 = tl.constexpr(int(CodeFormat.MXFP8))
_INT8 = tl.constexpr(int(CodeFormat.INT8_CHANNEL))
_SUMS = tl.constexpr(SUMS)
_COPY_UNITS = tl.constexpr(COPY_UNITS)


@triton.jit
def move(
    table,
    row_of_tile,
    results,
    CODE_FORMAT: tl.constexpr,
    TO_BUCKET: tl.constexpr,
    WITH_CHECKSUM: tl.constexpr,
    HAS_E4M3: tl.constexpr,
):
    """Move one tile.

    `results` begins as zeros: `SUMS` partial checksums, then the number of tiles from the first failed one on. Compiled
    separately for each code format, so that a program needs only the registers of its own. A GPU that `HAS_E4M3` rounds
    to codes by its own instruction.
    """
    tile = tl.program_id(0)
    row = table + tl.load(row_of_tile + tile) * ROW
    kind = tl.load(row + KIND)
    inner = tile - tl.load(row + FIRST_TILE).to(tl.int32)
    total = tl.full((), 0, tl.int64)
    bad = tl.full((), 0, tl.int32)
    if kind == _COPY_8:
        total = _copy(row, inner, tl.int64, 8, TO_BUCKET, WITH_CHECKSUM)
    elif kind == _COPY_4:
        total = _copy(row, inner, tl.int32, 4, TO_BUCKET, WITH_CHECKSUM)
    elif kind == _COPY_2:
        total = _copy(row, inner, tl.int16, 2, TO_BUCKET, WITH_CHECKSUM)
    elif kind == _COPY_1:
        total = _copy(row, inner, tl.int8, 1, TO_BUCKET, WITH_CHECKSUM)
    elif TO_BUCKET:
        if kind == _BFLOAT16:
            total, bad = _quantised(row, inner, tl.bfloat16, CODE_FORMAT, WITH_CHECKSUM)
        elif kind == _WIDE:
            if CODE_FORMAT == _BLOCK_FP8:
                total, bad = block_fp8_wide.quantise(row, inner, HAS_E4M3, WITH_CHECKSUM)
        elif kind == _FLOAT32:
            total, bad = _quantised(row, inner, tl.float32, CODE_FORMAT, WITH_CHECKSUM)
    if WITH_CHECKSUM:
        tl.atomic_add(results + tile % _SUMS, total, sem="relaxed")
    if bad:
        tl.atomic_max(results + _SUMS, (tl.num_programs(0) - tile).to(tl.int64), sem="relaxed")


@triton.jit
def _copy(row, tile, UNIT: tl.constexpr, BYTES: tl.constexpr, TO_BUCKET: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    at = tile * _COPY_UNITS + tl.arange(0, _COPY_UNITS)
    columns = tl.load(row + COLUMNS).to(tl.int32)
    inside = at < tl.load(row + ROWS).to(tl.int32) * columns
    local = tl.load(row + LOCAL_PLANE).to(tl.pointer_type(UNIT)) + steps(row, at // columns, at % columns)
    packed = tl.load(row + PACKED).to(tl.pointer_type(UNIT)) + at
    if TO_BUCKET:
        units = tl.load(local, mask=inside, other=0)
        tl.store(packed, units, mask=inside)
    else:
        units = tl.load(packed, mask=inside, other=0)
        tl.store(local, units, mask=inside)
    return sum_of(units, tl.load(row + OFFSET_BYTES) + at.to(tl.int64) * BYTES, BYTES, WITH_CHECKSUM)


@triton.jit
def _quantised(row, tile, LOCAL: tl.constexpr, CODE_FORMAT: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    total = tl.full((), 0, tl.int64)
    bad = tl.full((), 0, tl.int32)
    if CODE_FORMAT == _BLOCK_FP8:
        total, bad = block_fp8.quantise(row, tile, LOCAL, WITH_CHECKSUM)
    elif CODE_FORMAT == _MXFP8:
        total, bad = mxfp8.quantise(row, tile, LOCAL, WITH_CHECKSUM)
    elif CODE_FORMAT == _INT8:
        total, bad = int8_channel.quantise(row, tile, LOCAL, WITH_CHECKSUM)
    return total, bad
