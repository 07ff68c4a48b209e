"""Block FP8 to bfloat16 or float32.

The rule is that of DeepSeek-V3's `weight_dequant` (inference/kernel.py): the code as float32, times the scale in
float32, then rounded to the output type. So a bfloat16 is rounded twice, here as there.
"""

import torch

from converters.fp8.blocks import BLOCK, CODES, LARGEST_SCALE, Scratch, Tile, scales_shape, tiles

_OUTPUTS = (torch.bfloat16, torch.float32)
_NAN = 0x7F  # with either sign
# An e4m3 code is, shifted by 7 bits and without the copy of the sign that shifting leaves in bit 14, the float16 of a
# value smaller by the difference of their exponent biases, subnormals included. This is exact, and 20 times as fast as
# torch's own conversion on a CPU.
_MANTISSA_SHIFT = 7
_WITHOUT_BIT_14 = ~(1 << 14)
_BIAS_DIFFERENCE = 2.0 ** (15 - 7)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight of which `codes` [rows, columns] and `scales` [rows / 128, columns / 128] are all, in `dtype`.

    Raises ValueError as `dequantise_into` does, and where the shapes do not belong together.
    """
    if codes.dim() != 2 or tuple(scales.shape) != scales_shape(tuple(codes.shape)):
        raise ValueError(f"codes of shape {list(codes.shape)} with scales of shape {list(scales.shape)}")
    out = torch.empty(codes.shape, dtype=dtype)
    dequantise_into(codes, scales, out)
    return out


@torch.no_grad()
def dequantise_into(
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    *,
    row_start: int = 0,
    column_start: int = 0,
    scratch: Scratch | None = None,
) -> None:
    """Write the values of a box of a weight into `out`, a view of any strides, in bfloat16 or float32.

    `codes` (float8_e4m3fn, of the shape of `out`) are the box that begins at `row_start` and `column_start`, anywhere
    in a block; `scales` those of the whole weight. With `scratch`, many calls share the memory they work in.
    Raises ValueError, naming the element, for a code that is NaN, and for a scale that is not finite or above 2**119;
    also for tensors of another type or shape. What is then in `out` is undefined.
    """
    _check(codes, scales, out, row_start, column_start)
    _check_scales(scales, codes, row_start, column_start)
    raw = codes.view(torch.int8)
    scratch = scratch or Scratch()
    for tile in tiles(tuple(codes.shape), row_start):
        source, target = raw[tile.rows, tile.columns], out[tile.rows, tile.columns]
        row, column = row_start + tile.rows.start, column_start + tile.columns.start
        _check_codes(source, scratch.like(tile, torch.int8), row, column)
        half = scratch.like(tile, torch.int16)
        half.view(source.shape).copy_(source)
        half.bitwise_left_shift_(_MANTISSA_SHIFT).bitwise_and_(_WITHOUT_BIT_14)
        single = scratch.like(tile, torch.float32).copy_(half.view(torch.float16))
        target.copy_(single.mul_(_factors(scales, tile, row, column)).view(target.shape))


def _check(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, row_start: int, column_start: int) -> None:
    if codes.dtype is not CODES or out.dtype not in _OUTPUTS or not scales.is_floating_point():
        raise ValueError(f"codes in {codes.dtype} with scales in {scales.dtype} cannot become {out.dtype}")
    if codes.dim() != 2 or codes.shape != out.shape:
        raise ValueError(f"codes of shape {list(codes.shape)} cannot become a weight of shape {list(out.shape)}")
    needed = scales_shape((row_start + codes.shape[0], column_start + codes.shape[1]))
    if scales.dim() != 2 or scales.shape[0] < needed[0] or scales.shape[1] < needed[1]:
        raise ValueError(f"there are {list(scales.shape)} scales where at least {list(needed)} are needed")


def _check_scales(scales: torch.Tensor, codes: torch.Tensor, row_start: int, column_start: int) -> None:
    rows, columns = (
        slice(start // BLOCK, -(-(start + n) // BLOCK))
        for start, n in ((row_start, codes.shape[0]), (column_start, codes.shape[1]))
    )
    unusable = ~(scales[rows, columns].abs() <= LARGEST_SCALE)
    if unusable.any():
        row, column = unusable.nonzero()[0].tolist()
        row, column = rows.start + row, columns.start + column
        raise ValueError(f"the scale of block {row}, {column} is {scales[row, column].item()}")


def _check_codes(source: torch.Tensor, magnitudes: torch.Tensor, first_row: int, first_column: int) -> None:
    magnitudes = magnitudes.view(source.shape)
    torch.bitwise_and(source, _NAN, out=magnitudes)
    if magnitudes.amax() == _NAN:
        row, column = (magnitudes == _NAN).nonzero()[0].tolist()
        raise ValueError(f"the code in row {first_row + row}, column {first_column + column} is NaN")


def _factors(scales: torch.Tensor, tile: Tile, row: int, column: int) -> torch.Tensor:
    """What the float16 values of a tile, which begins at `row` and `column`, are multiplied by [blocks, 1, columns]."""
    _, _, columns = tile.shape
    first, stop = column // BLOCK, -(-(column + columns) // BLOCK)
    used = scales[row // BLOCK : row // BLOCK + tile.blocks, first:stop].to(torch.float32) * _BIAS_DIFFERENCE
    offset = column - first * BLOCK
    return used.repeat_interleave(BLOCK, dim=1)[:, None, offset : offset + columns]
