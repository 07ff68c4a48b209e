"""Converts bfloat16, float16 or float32 to block FP8.

The rule is that of DeepSeek-V3's kernels (inference/kernel.py): the scale of a block is its largest magnitude over 448,
in float32; the code is the weight over the scale, divided in float32 and rounded to the nearest e4m3, ties to even. A
block of zeros would have the scale 0 and codes of 0 / 0, so the largest magnitude is raised to at least 1e-10, as in
the quantisation kernels of SGLang, slime and verl.

For power-of-two scales (UE8M0), as in DeepSeek-V3.1, the rule is that of `per_block_cast_to_fp8` in DeepGEMM
(deep_gemm/utils/math.py): the scale is rounded up to the next power of two, and the largest magnitude is raised to at
least 1e-4. If the largest code is then 224, half the scale with twice the codes represents the same numbers. Engines
arrive at this form when they requantise what they load, so it is used here, too.
"""

import torch

from converters.fp8.blocks import (
    BLOCK,
    CODES,
    HALVED_UP_TO,
    LARGEST_CODE,
    LARGEST_WEIGHT,
    SMALLEST_MAGNITUDE,
    SMALLEST_MAGNITUDE_OF_POWERS,
    Scratch,
    Tile,
    scales_shape,
    tiles,
)

_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
"""Dtype of a weight -> integer dtype in which its bits without the sign are ordered by magnitude, NaN last."""


@torch.no_grad()
def quantise_into(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    power_of_two: bool = False,
    scratch: Scratch | None = None,
) -> None:
    """Write the codes and scales of a weight, or of whole rows or columns of its blocks, into views with any strides.

    `weight` (bfloat16, float16 or float32) and `codes` (float8_e4m3fn) have the same shape, and begin at the corner of
    a block; `scales` (float32) are those of its blocks. With `scratch`, calls share working memory.

    Raises ValueError, naming the block, for a weight that is not finite or above `LARGEST_WEIGHT`; also for a wrong
    dtype or shape. The contents of `codes` and `scales` are then undefined.
    """
    _check(weight, codes, scales)
    # Imported here because LLVM is large.
    from converters.fp8 import compiled_quantise

    if compiled_quantise.knows(weight, codes, scales) and compiled_quantise.quantise(
        weight, codes, scales, power_of_two=power_of_two
    ):
        return
    _in_torch(weight, codes, scales, power_of_two, scratch or Scratch(weight.device))


def _in_torch(
    weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, power_of_two: bool, scratch: Scratch
) -> None:
    """The rule in torch: for tensors that machine code does not support, and to name a block that cannot be encoded."""
    for tile in tiles((weight.shape[0], weight.shape[1]), 0):
        source, target = weight[tile.rows, tile.columns], codes[tile.rows, tile.columns]
        largest = _largest_magnitudes(source, tile, scratch)
        smallest = SMALLEST_MAGNITUDE_OF_POWERS if power_of_two else SMALLEST_MAGNITUDE
        largest.clamp_(min=smallest)
        # A tensor as the divisor, because a GPU would replace division by a number with multiplication by its inverse.
        scale = largest / torch.full_like(largest, LARGEST_CODE)
        if power_of_two:
            scale = _rounded_up(scale)
        single = scratch.like(tile, torch.float32)
        single.view(source.shape).copy_(source)
        # A quotient is at most 448 * (1 + 2**-22), which rounds to 448, so nothing needs saturating.
        single.div_(_spread(scale, source.shape[1]))
        if not power_of_two:
            target.copy_(single.view(target.shape))
        else:
            halved = largest <= HALVED_UP_TO * scale
            made = single.to(CODES).view(torch.uint8)
            target.copy_(
                torch.where(_spread(halved, source.shape[1]), _doubled(made), made).view(CODES).view(target.shape)
            )
            scale = torch.where(halved, scale / 2, scale)
        row, column = tile.rows.start // BLOCK, tile.columns.start // BLOCK
        scales[row : row + tile.blocks, column : column + scale.shape[1]] = scale


def _check(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    if weight.dtype not in _INTEGERS or codes.dtype is not CODES or scales.dtype is not torch.float32:
        raise ValueError(f"a weight in {weight.dtype} cannot become {codes.dtype} with scales in {scales.dtype}")
    if weight.dim() != 2 or weight.shape != codes.shape or tuple(scales.shape) != scales_shape(tuple(weight.shape)):
        raise ValueError(
            f"a weight of shape {list(weight.shape)} cannot become codes of shape {list(codes.shape)} with scales of"
            f" shape {list(scales.shape)}"
        )


def _largest_magnitudes(source: torch.Tensor, tile: Tile, scratch: Scratch) -> torch.Tensor:
    """The largest magnitude of each block in a tile."""
    integer = _INTEGERS[source.dtype]
    bits = scratch.like(tile, integer)
    torch.bitwise_and(source.view(integer), torch.iinfo(integer).max, out=bits.view(source.shape))
    magnitudes = bits.amax(1).view(source.dtype).to(torch.float32)
    magnitudes = torch.nn.functional.pad(magnitudes, (0, -magnitudes.shape[1] % BLOCK))
    largest = magnitudes.view(tile.blocks, -1, BLOCK).amax(2)
    if not largest.amax() <= LARGEST_WEIGHT:
        row, column = (~(largest <= LARGEST_WEIGHT)).nonzero()[0].tolist()
        row, column = row + tile.rows.start // BLOCK, column + tile.columns.start // BLOCK
        raise ValueError(f"block {row}, {column} holds a weight that is NaN, infinite or too large for FP8")
    return largest


def _spread(of_blocks: torch.Tensor, columns: int) -> torch.Tensor:
    """Repeat a number per block for each column of a tile; broadcasts over the rows of a block."""
    return of_blocks.repeat_interleave(BLOCK, dim=1)[:, None, :columns]


def _doubled(codes: torch.Tensor) -> torch.Tensor:
    """The codes (as bytes) of twice the numbers: the next exponent, or for a subnormal twice the mantissa."""
    magnitudes = codes & 0x7F
    return torch.where(magnitudes < 8, 2 * magnitudes, magnitudes + 8) | (codes & 0x80)


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """Round up to powers of two: a nonzero mantissa carries into the exponent."""
    return ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
