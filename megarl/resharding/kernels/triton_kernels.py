"""The kernel that moves a block on a GPU: a program moves one tile of one plane of the launch table.

All conversions between number formats are done on bits, so they are the same on every GPU and under Triton's
interpreter, and no NaN changes on its way.
"""

import triton
import triton.language as tl

from converters.fp8.blocks import (
    BLOCK,
    HALVED_UP_TO,
    LARGEST_CODE,
    LARGEST_SCALE,
    LARGEST_WEIGHT,
    SMALLEST_MAGNITUDE,
    SMALLEST_MAGNITUDE_OF_POWERS,
)
from megarl.resharding.kernels.launch_table import COPY_UNITS, Column, Kind

SUMS = 256
"""Places at which programs add up their parts of the checksum: with one, all of them would wait for it."""

_ROW = tl.constexpr(len(Column))
_KIND = tl.constexpr(int(Column.KIND))
_FIRST_TILE = tl.constexpr(int(Column.FIRST_TILE))
_LOCAL = tl.constexpr(int(Column.LOCAL))
_PACKED = tl.constexpr(int(Column.PACKED))
_OFFSET_BYTES = tl.constexpr(int(Column.OFFSET_BYTES))
_ROWS = tl.constexpr(int(Column.ROWS))
_COLUMNS = tl.constexpr(int(Column.COLUMNS))
_ROW_STRIDE = tl.constexpr(int(Column.ROW_STRIDE))
_COLUMN_STRIDE = tl.constexpr(int(Column.COLUMN_STRIDE))
_SCALES = tl.constexpr(int(Column.SCALES))
_SCALES_OFFSET_BYTES = tl.constexpr(int(Column.SCALES_OFFSET_BYTES))
_POWER_OF_TWO = tl.constexpr(int(Column.POWER_OF_TWO))
_COPY_1 = tl.constexpr(int(Kind.COPY_1))
_COPY_2 = tl.constexpr(int(Kind.COPY_2))
_COPY_4 = tl.constexpr(int(Kind.COPY_4))
_COPY_8 = tl.constexpr(int(Kind.COPY_8))
_BFLOAT16 = tl.constexpr(int(Kind.QUANTISED_BFLOAT16))
_FLOAT32 = tl.constexpr(int(Kind.QUANTISED_FLOAT32))
_SUMS = tl.constexpr(SUMS)
_COPY_UNITS = tl.constexpr(COPY_UNITS)
_BLOCK = tl.constexpr(BLOCK)
_SLAB = tl.constexpr(16)
_SMALLEST_MAGNITUDE = tl.constexpr(SMALLEST_MAGNITUDE)
_SMALLEST_MAGNITUDE_OF_POWERS = tl.constexpr(SMALLEST_MAGNITUDE_OF_POWERS)
_LARGEST_WEIGHT = tl.constexpr(LARGEST_WEIGHT)
_HALVED_UP_TO = tl.constexpr(HALVED_UP_TO)
_LARGEST_SCALE = tl.constexpr(LARGEST_SCALE)
_LARGEST_CODE = tl.constexpr(LARGEST_CODE)
_SMALLEST_NORMAL_CODE = tl.constexpr(2.0**-6)
_SMALLEST_CODE = tl.constexpr(2.0**-9)
# Its neighbours in float32 are as far apart as the smallest codes: adding it to a small number rounds that to a code.
_ROUNDING = tl.constexpr(2.0**14)


@triton.jit
def move(table, row_of_tile, results, TO_BUCKET: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    """Move one tile. `results` are zeros: sums of the checksum, then tiles from the first that failed to the end."""
    tile = tl.program_id(0)
    row = table + tl.load(row_of_tile + tile) * _ROW
    kind = tl.load(row + _KIND)
    inner = tile - tl.load(row + _FIRST_TILE).to(tl.int32)
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
    elif kind == _BFLOAT16:
        total, bad = _block(row, inner, tl.bfloat16, TO_BUCKET, WITH_CHECKSUM)
    elif kind == _FLOAT32:
        total, bad = _block(row, inner, tl.float32, TO_BUCKET, WITH_CHECKSUM)
    if WITH_CHECKSUM:
        tl.atomic_add(results + tile % _SUMS, total, sem="relaxed")
    if bad:
        tl.atomic_max(results + _SUMS, (tl.num_programs(0) - tile).to(tl.int64), sem="relaxed")


@triton.jit
def _copy(row, tile, UNIT: tl.constexpr, BYTES: tl.constexpr, TO_BUCKET: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    at = tile * _COPY_UNITS + tl.arange(0, _COPY_UNITS)
    columns = tl.load(row + _COLUMNS).to(tl.int32)
    inside = at < tl.load(row + _ROWS).to(tl.int32) * columns
    local = tl.load(row + _LOCAL).to(tl.pointer_type(UNIT)) + _steps(row, at // columns, at % columns)
    packed = tl.load(row + _PACKED).to(tl.pointer_type(UNIT)) + at
    if TO_BUCKET:
        units = tl.load(local, mask=inside, other=0)
        tl.store(packed, units, mask=inside)
    else:
        units = tl.load(packed, mask=inside, other=0)
        tl.store(local, units, mask=inside)
    return _sum(units, tl.load(row + _OFFSET_BYTES) + at.to(tl.int64) * BYTES, BYTES, WITH_CHECKSUM)


@triton.jit
def _quantise(row, tile, LOCAL: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    """Quantise one block; returns its part of the checksum, and not zero if a weight cannot be quantised.

    It is read twice, slab by slab: the second time it lies in the cache, and all of it would not fit into registers.
    """
    largest = tl.full((), 0, tl.int32)
    for slab in range(0, _BLOCK, _SLAB):
        local, _at, inside = _slab(row, tile, slab, LOCAL)
        largest = tl.maximum(largest, tl.max(_float32_bits(tl.load(local, mask=inside, other=0.0)) & 0x7FFFFFFF))
    scale, halved = _scale(largest, tl.load(row + _POWER_OF_TWO))
    # A power of two is halved in its exponent.
    kept = scale - (halved << 23)
    tl.store(tl.load(row + _SCALES).to(tl.pointer_type(tl.int32)) + tile, kept)
    total = _scale_sum(row, tile, kept, WITH_CHECKSUM)
    for slab in range(0, _BLOCK, _SLAB):
        local, at, inside = _slab(row, tile, slab, LOCAL)
        codes = _encode(_float32_bits(tl.load(local, mask=inside, other=0.0)), scale, halved)
        tl.store(tl.load(row + _PACKED).to(tl.pointer_type(tl.int8)) + at, codes, mask=inside)
        total += _sum(codes, tl.load(row + _OFFSET_BYTES) + at.to(tl.int64), 1, WITH_CHECKSUM)
    return total, (largest > _bits(_LARGEST_WEIGHT)).to(tl.int32)


@triton.jit
def _dequantise(row, tile, LOCAL: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    """Dequantise one block; returns its part of the checksum, and not zero if a code or the scale is no number."""
    scale = tl.load(tl.load(row + _SCALES).to(tl.pointer_type(tl.int32)) + tile)
    total = _scale_sum(row, tile, scale, WITH_CHECKSUM)
    largest = tl.full((), 0, tl.int32)
    for slab in range(0, _BLOCK, _SLAB):
        local, at, inside = _slab(row, tile, slab, LOCAL)
        codes = tl.load(tl.load(row + _PACKED).to(tl.pointer_type(tl.int8)) + at, mask=inside, other=0)
        values = _decode(codes.to(tl.int32)) * scale.to(tl.float32, bitcast=True)
        tl.store(local, _as(values, LOCAL), mask=inside)
        largest = tl.maximum(largest, tl.max(codes.to(tl.int32) & 0x7F))
        total += _sum(codes, tl.load(row + _OFFSET_BYTES) + at.to(tl.int64), 1, WITH_CHECKSUM)
    bad = (largest == 0x7F) | ((scale & 0x7FFFFFFF) > _bits(_LARGEST_SCALE))
    return total, bad.to(tl.int32)


@triton.jit
def _block(row, tile, LOCAL: tl.constexpr, TO_BUCKET: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    if TO_BUCKET:
        total, bad = _quantise(row, tile, LOCAL, WITH_CHECKSUM)
    else:
        total, bad = _dequantise(row, tile, LOCAL, WITH_CHECKSUM)
    return total, bad


@triton.jit
def _slab(row, tile, slab, LOCAL: tl.constexpr):
    """Some rows of a block: where they are in the local plane, their positions in the bucket's, and which exist."""
    columns = tl.load(row + _COLUMNS).to(tl.int32)
    across = (columns + _BLOCK - 1) // _BLOCK
    x = (tile // across) * _BLOCK + slab + tl.arange(0, _SLAB)[:, None]
    y = (tile % across) * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = (x < tl.load(row + _ROWS).to(tl.int32)) & (y < columns)
    return tl.load(row + _LOCAL).to(tl.pointer_type(LOCAL)) + _steps(row, x, y), x * columns + y, inside


@triton.jit
def _scale_sum(row, tile, scale, WITH_CHECKSUM: tl.constexpr):
    total = tl.full((), 0, tl.int64)
    if WITH_CHECKSUM:
        total = scale.to(tl.int64) * ((tl.load(row + _SCALES_OFFSET_BYTES) >> 2) + tile + 1)
    return total


@triton.jit
def _steps(row, x, y):
    """How many elements row `x` and column `y` of the local plane are from its start."""
    return x.to(tl.int64) * tl.load(row + _ROW_STRIDE) + y.to(tl.int64) * tl.load(row + _COLUMN_STRIDE)


@triton.jit
def _sum(units, offset_bytes, BYTES: tl.constexpr, WITH_CHECKSUM: tl.constexpr):
    """The part of the checksum that is of `units`, signed whole numbers at `offset_bytes` of the block's memory."""
    total = tl.full((), 0, tl.int64)
    if WITH_CHECKSUM:
        position = (offset_bytes >> 2) + 1
        wide = units.to(tl.int64)
        if BYTES == 8:
            total = tl.sum(((wide << 32) >> 32) * position + (wide >> 32) * (position + 1))
        elif BYTES == 4:
            total = tl.sum(wide * position)
        else:
            # A word is signed: its last bytes as they are, the others as unsigned numbers.
            lane = offset_bytes & 3
            unsigned = wide & ((1 << (8 * BYTES)) - 1)
            total = tl.sum((tl.where(lane == 4 - BYTES, wide, unsigned) << (8 * lane)) * position)
    return total


@triton.jit
def _bits(value):
    """The bits of a number as float32."""
    return tl.full((), value, tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _float32_bits(values):
    if values.dtype == tl.bfloat16:
        return values.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:  # Triton compiles what stands behind a return, too
        return values.to(tl.int32, bitcast=True)


@triton.jit
def _scale(largest, power_of_two):
    """The bits of the scale of a block whose largest magnitude has these bits; and whether, as 0 or 1, it is halved."""
    smallest = tl.where(power_of_two != 0, _bits(_SMALLEST_MAGNITUDE_OF_POWERS), _bits(_SMALLEST_MAGNITUDE))
    magnitude = tl.maximum(largest, smallest).to(tl.float32, bitcast=True)
    scale = tl.div_rn(magnitude, tl.full((), _LARGEST_CODE, tl.float32)).to(tl.int32, bitcast=True)
    # A mantissa that is not zero carries into the exponent.
    scale = tl.where(power_of_two != 0, (scale + 0x7FFFFF) & 0x7F800000, scale)
    halved = (power_of_two != 0) & (magnitude <= _HALVED_UP_TO * scale.to(tl.float32, bitcast=True))
    return scale, halved.to(tl.int32)


@triton.jit
def _encode(bits, scale, halved):
    """The e4m3 codes of numbers over a scale, all as bits of float32: to nearest, ties to even, as `quantise`.

    They are those of twice the numbers where the scale is `halved`.
    """
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    quotient = tl.div_rn(magnitude, scale.to(tl.float32, bitcast=True) + tl.zeros_like(magnitude))
    raw = quotient.to(tl.int32, bitcast=True)
    # 20 bits of the mantissa are rounded away, and the exponents' biases are 127 and 7.
    normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = (quotient + _ROUNDING).to(tl.int32, bitcast=True) - _bits(_ROUNDING)
    codes = tl.where(raw < _bits(_SMALLEST_NORMAL_CODE), small, normal)
    codes = tl.where(halved != 0, tl.where(codes < 8, codes * 2, codes + 8), codes)
    return (codes | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _decode(codes):
    """The float32 numbers of e4m3 codes that are not NaN."""
    magnitude = codes & 0x7F
    normal = (magnitude << 20) + ((127 - 7) << 23)
    small = (magnitude.to(tl.float32) * _SMALLEST_CODE).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < 8, small, normal) | ((codes & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _as(values, TYPE: tl.constexpr):
    """float32, none of them NaN, as bfloat16, to nearest, ties to even, or as it is."""
    if TYPE == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return values
