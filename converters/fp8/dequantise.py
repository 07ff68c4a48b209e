"""Converts block FP8 to bfloat16 or float32.

The rule is that of DeepSeek-V3's `weight_dequant` (inference/kernel.py): the code as float32, times the scale in
float32, then rounded to the output dtype. So a bfloat16 is rounded twice, as in the original.
"""

import torch

from converters.fp8.blocks import BLOCK, CODES, LARGEST_SCALE, Scratch, scales_shape, tiles

_OUTPUTS = (torch.bfloat16, torch.float32)
# The two NaNs: the largest code as a signed byte (positive), and as an unsigned byte (negative).
_NANS = ((torch.int8, 0x7F), (torch.uint8, 0xFF))
# An e4m3 code shifted by 7 bits, without the copy of the sign that shifting leaves in bit 14, is a float16 with the
# same value up to the difference of the exponent biases, subnormals included. This is exact, and 20 times as fast as
# torch's own conversion on a CPU. It is a multiplication because torch's shift is slower.
_MANTISSA_SHIFT = 2**7
_WITHOUT_BIT_14 = ~(1 << 14)
_BIAS_DIFFERENCE = 2.0 ** (15 - 7)


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
    """Write the values of a box of a weight into `out`, a view with any strides, in bfloat16 or float32.

    `codes` (float8_e4m3fn, same shape as `out`) are the codes of the box that begins at `row_start` and `column_start`,
    which may be inside a block. `scales` are those of the whole weight. With `scratch`, calls share working memory.

    Raises ValueError for a NaN code, naming the element, and for a scale that is not finite or above 2**119, naming the
    block; also for a wrong dtype or shape. The content of `out` is then undefined.
    """
    _check(codes, scales, out, row_start, column_start)
    used = _used(scales, codes, row_start, column_start)
    # Imported here because LLVM is large.
    from converters.fp8 import compiled_dequantise

    if compiled_dequantise.knows(codes, out) and compiled_dequantise.dequantise(
        codes, used, out, row_start, column_start
    ):
        return
    _check_codes(codes, row_start, column_start)
    _in_torch(codes, used, out, row_start, column_start, scratch or Scratch(codes.device))


def _in_torch(
    codes: torch.Tensor, used: torch.Tensor, out: torch.Tensor, row_start: int, column_start: int, scratch: Scratch
) -> None:
    """The rule in torch, for tensors that machine code does not support."""
    factors = _spread(used * _BIAS_DIFFERENCE, column_start % BLOCK, codes.shape[1])
    raw = codes.view(torch.int8)
    first = row_start // BLOCK
    for tile in tiles((codes.shape[0], codes.shape[1]), row_start):
        half = scratch.like(tile, torch.int16)
        half.view(tile.shape[0] * tile.shape[1], -1).copy_(raw[tile.rows, tile.columns])
        half.mul_(_MANTISSA_SHIFT).bitwise_and_(_WITHOUT_BIT_14)
        single = scratch.like(tile, torch.float32).copy_(half.view(torch.float16))
        block = (row_start + tile.rows.start) // BLOCK - first
        single.mul_(factors[block : block + tile.blocks, None, tile.columns])
        target = out[tile.rows, tile.columns]
        target.copy_(single.view(target.shape))


def _check(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, row_start: int, column_start: int) -> None:
    if codes.dtype is not CODES or out.dtype not in _OUTPUTS or not scales.is_floating_point():
        raise ValueError(f"codes in {codes.dtype} with scales in {scales.dtype} cannot become {out.dtype}")
    if codes.dim() != 2 or codes.shape != out.shape:
        raise ValueError(f"codes of shape {list(codes.shape)} cannot become a weight of shape {list(out.shape)}")
    needed = scales_shape((row_start + codes.shape[0], column_start + codes.shape[1]))
    if scales.dim() != 2 or scales.shape[0] < needed[0] or scales.shape[1] < needed[1]:
        raise ValueError(f"there are {list(scales.shape)} scales where at least {list(needed)} are needed")


def _used(scales: torch.Tensor, codes: torch.Tensor, row_start: int, column_start: int) -> torch.Tensor:
    """The scales of the blocks that a box overlaps, contiguous and in float32."""
    rows, columns = (
        slice(start // BLOCK, -(-(start + n) // BLOCK))
        for start, n in ((row_start, codes.shape[0]), (column_start, codes.shape[1]))
    )
    used = scales[rows, columns].to(torch.float32).contiguous()
    if used.numel() and not used.abs().amax() <= LARGEST_SCALE:
        row, column = (~(used.abs() <= LARGEST_SCALE)).nonzero()[0].tolist()
        row, column = rows.start + row, columns.start + column
        raise ValueError(f"the scale of block {row}, {column} is {scales[row, column].item()}")
    return used


def _spread(of_blocks: torch.Tensor, offset: int, columns: int) -> torch.Tensor:
    """Repeat a number per block for each column of a box, which begins `offset` columns into the first block."""
    return of_blocks.repeat_interleave(BLOCK, dim=1)[:, offset : offset + columns]


def _check_codes(codes: torch.Tensor, row_start: int, column_start: int) -> None:
    for integer, nan in _NANS:
        raw = codes.view(integer)
        if raw.numel() and raw.amax() == nan:
            row, column = (raw == nan).nonzero()[0].tolist()
            raise ValueError(f"the code in row {row_start + row}, column {column_start + column} is NaN")
