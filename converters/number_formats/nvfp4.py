"""NVFP4: e2m1 codes, two per byte, an e4m3 scale per 16 elements of a row, and a float32 global scale (NVIDIA).

The rule is that of NVIDIA's recipe (arXiv 2509.25149, appendix C) for a given global scale: a block's scale is its
largest magnitude over 6, times the global scale, rounded to the nearest e4m3; the code is the weight times the global
scale over the block's scale, rounded to the nearest e2m1, ties to even, and saturated at 6. A weight is its code times
its block's scale over the global scale.

The recipe's global scale is 448 * 6 over the largest magnitude of the whole tensor, so that scales use the full range
of e4m3. Shards would have to agree on it before anything can be quantised, and so would matrices that an engine joins:
vLLM multiplies q_proj, k_proj and v_proj by a single global scale. Here it is the same for all tensors. Scales are
floating-point numbers, so this costs no precision as long as they are normal, which they are for blocks whose largest
magnitude is from 0.0004 to 10.5.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from converters.architectures import Architecture
from converters.fp8 import quantised_names
from converters.number_formats.compressed_tensors import compressed_tensors_config
from converters.number_formats.engine_cuts import check_columns
from converters.number_formats.number_format import NumberFormat
from converters.number_formats.row_tiles import row_tiles

_BLOCK = 16
_LARGEST_CODE = 6.0
_LARGEST_SCALE = 448.0
GLOBAL_SCALE = 256.0
"""A power of two, so that multiplying by it is exact."""
LARGEST_WEIGHT = _LARGEST_CODE * _LARGEST_SCALE / GLOBAL_SCALE
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By code, from 0 to 7; codes 8 to 15 are their negatives."""
_UP_FROM = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Midpoints between magnitudes, and whether a tie rounds up, to the even code."""


def _engine_config(architecture: Architecture) -> dict[str, Any]:
    """Only weights are quantised: scales of activations would have to be calibrated."""
    number = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": _BLOCK}
    return compressed_tensors_config(
        architecture, "nvfp4-pack-quantized", weights={**number, "dynamic": False}, activations=None
    )


@torch.no_grad()
def _quantise_into(weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write the codes, uint8 [rows, columns / 2], and the scales, float8_e4m3fn [rows, columns / 16].

    Raises ValueError, naming the block, for a weight that is NaN, infinite or above `LARGEST_WEIGHT`, and for columns
    that are not whole blocks.
    """
    if weight.shape[1] % _BLOCK:
        raise ValueError(f"a weight of {weight.shape[1]} columns is not made of blocks of {_BLOCK}")
    for tile in row_tiles(weight):
        blocks = weight[tile].to(torch.float32).unflatten(1, (-1, _BLOCK))
        largest = blocks.abs().amax(2)
        if not (largest <= LARGEST_WEIGHT).all():
            row, column = (~(largest <= LARGEST_WEIGHT)).nonzero()[0].tolist()
            raise ValueError(
                f"block {tile.start + row}, {column} holds a weight that is NaN, infinite or above {LARGEST_WEIGHT}"
            )
        scale = (GLOBAL_SCALE * (largest * (1 / _LARGEST_CODE))).to(torch.float8_e4m3fn)
        scales[tile].copy_(scale)
        # A block whose scale is 0 gets codes of 0.
        factor = (scale.to(torch.float32) / GLOBAL_SCALE).reciprocal().nan_to_num_(posinf=0.0)
        found = _nearest(blocks * factor.unsqueeze(2)).flatten(1)
        codes[tile].copy_(found[:, ::2] | found[:, 1::2] << 4)


def _nearest(numbers: Tensor) -> Tensor:
    """The codes, one per byte, of the nearest magnitudes; the sign of zero is dropped."""
    magnitudes = numbers.abs()
    codes = torch.zeros(numbers.shape, dtype=torch.uint8, device=numbers.device)
    for middle, goes_up in _UP_FROM:
        codes += magnitudes >= middle if goes_up else magnitudes > middle
    return codes | ((numbers < 0) & (codes > 0)).to(torch.uint8) << 3


def _dequantise_into(codes: Tensor, scales: Tensor, weight: Tensor) -> None:
    values = torch.tensor([sign * each for sign in (1, -1) for each in _MAGNITUDES], device=codes.device)
    each = torch.stack([codes & 0xF, codes >> 4], 2).flatten(1)
    blocks = values[each.long()].unflatten(1, (-1, _BLOCK))
    weight.copy_((blocks * (scales.to(torch.float32) / GLOBAL_SCALE).unsqueeze(2)).flatten(1))


NVFP4 = NumberFormat(
    name="nvfp4",
    title="NVFP4",
    block=(1, _BLOCK),
    codes=torch.uint8,
    elements_per_code=2,
    codes_suffix="_packed",
    scales=torch.float8_e4m3fn,
    scales_suffix="_scale",
    global_scale=GLOBAL_SCALE,
    quantised_names=quantised_names,
    engine_config=_engine_config,
    quantise_into=_quantise_into,
    dequantise_into=_dequantise_into,
    check=partial(check_columns, "nvfp4", _BLOCK),
)
