"""MXFP8: e4m3 codes and a power-of-two scale per 32 elements of a row, an MX format of the Open Compute Project (1.0).

The scale of a block is 2 to the power floor(log2(its largest magnitude)) - 8, where 8 is the exponent of e4m3's largest
number. It is stored as E8M0: the biased exponent in a byte. The code is the weight over the scale, rounded to the
nearest e4m3, ties to even, and saturated at 448 (section 6.3 of the specification). torchao calls this rule FLOOR. The
quantisers of vLLM and Transformer Engine use the next power of two if a block's largest code would exceed 448; readers
decode both in the same way.
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

_BLOCK = 32
_LARGEST_CODE = 448.0
_LARGEST_EXPONENT = 8
_BIAS = 127
_MANTISSA_BITS = 23
_NO_SCALE = 255
"""The scale that means NaN."""
_NOT_FINITE = 255
"""Exponent bits of a float32 that is NaN or infinite."""


def _engine_config(architecture: Architecture) -> dict[str, Any]:
    """Activations are quantised to MXFP8, too, dynamically."""
    number = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": _BLOCK}
    scales = {"scale_dtype": "torch.uint8"}
    return compressed_tensors_config(
        architecture,
        "mxfp8-quantized",
        weights={**number, **scales, "dynamic": False},
        activations={**number, **scales, "dynamic": True},
    )


@torch.no_grad()
def _quantise_into(weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write the codes, float8_e4m3fn of the shape of `weight`, and the scales, uint8 [rows, columns / 32].

    Raises ValueError, naming the block, for a weight that is NaN or infinite, and for columns that are not whole
    blocks.
    """
    if weight.shape[1] % _BLOCK:
        raise ValueError(f"a weight of {weight.shape[1]} columns is not made of blocks of {_BLOCK}")
    for tile in row_tiles(weight):
        blocks = weight[tile].to(torch.float32).unflatten(1, (-1, _BLOCK))
        # The bits without the sign are ordered by magnitude, NaN last. The exponent bits are floor(log2) + 127, or 0
        # for numbers so small that their block has the smallest scale.
        exponents = (blocks.view(torch.int32) & torch.iinfo(torch.int32).max).amax(2) >> _MANTISSA_BITS
        if (exponents == _NOT_FINITE).any():
            row, column = (exponents == _NOT_FINITE).nonzero()[0].tolist()
            raise ValueError(f"block {tile.start + row}, {column} holds a weight that is NaN or infinite")
        scale = (exponents - _LARGEST_EXPONENT).clamp_(min=0)
        scales[tile].copy_(scale)
        # Multiplying is exact: the inverse of the scale is a power of two, made from its bits.
        inverse = ((2 * _BIAS - scale) << _MANTISSA_BITS).view(torch.float32)
        scaled = (blocks * inverse.unsqueeze(2)).clamp_(-_LARGEST_CODE, _LARGEST_CODE)
        codes[tile].copy_(scaled.flatten(1))


def _dequantise_into(codes: Tensor, scales: Tensor, weight: Tensor) -> None:
    """Write the weights. Raises ValueError, naming the block, for a NaN code or scale."""
    blocks = codes.to(torch.float32).unflatten(1, (-1, _BLOCK))
    no_numbers = blocks.isnan().any(2) | (scales == _NO_SCALE)
    if no_numbers.any():
        row, column = no_numbers.nonzero()[0].tolist()
        raise ValueError(f"block {row}, {column} has a code or a scale that is NaN")
    weight.copy_(torch.ldexp(blocks, scales.to(torch.int32).unsqueeze(2) - _BIAS).flatten(1))


MXFP8 = NumberFormat(
    name="mxfp8",
    title="MXFP8",
    block=(1, _BLOCK),
    codes=torch.float8_e4m3fn,
    scales=torch.uint8,
    scales_suffix="_scale",
    quantised_names=quantised_names,
    engine_config=_engine_config,
    quantise_into=_quantise_into,
    dequantise_into=_dequantise_into,
    # One launch reads the weights, twice as many bytes, and writes the codes.
    pack_passes=3,
    check=partial(check_columns, "mxfp8", _BLOCK),
)
