"""INT8 per channel: integer codes and a float32 scale per row, the compressed-tensors format of W8A8 models.

The scale of a row (an output channel) is its largest magnitude over 127, in float32; the code is the weight over the
scale, divided in float32 and rounded to the nearest integer, ties to even. This is symmetric quantisation as in
SmoothQuant (arXiv 2211.10438, equation 1) and in vLLM's own quantisation of experts. The compressed-tensors tool
divides by 127.5 instead and clips the largest code; readers decode both in the same way.
"""

from typing import Any

import torch
from torch import Tensor

from converters.architectures import Architecture
from converters.fp8 import quantised_names
from converters.number_formats.compressed_tensors import compressed_tensors_config
from converters.number_formats.number_format import WHOLE_ROW, NumberFormat
from converters.number_formats.row_tiles import row_tiles

LARGEST_CODE = 127.0
LARGEST_WEIGHT = 2.0**127
"""Low enough below the largest float32 that no scale times its code exceeds that."""
SMALLEST_MAGNITUDE = 1e-10
"""Lower limit of a row's largest magnitude in computing its scale, so that a row of zeros has a nonzero scale."""


def _check(architecture: Architecture, tensor_parallel: int, expert_tensor_parallel: int) -> None:
    """Accept any model: an engine that cuts a row has the scale of the whole row on every rank."""


def _engine_config(architecture: Architecture) -> dict[str, Any]:
    """W8A8: activations are quantised to INT8 per token, dynamically."""
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    return compressed_tensors_config(
        architecture,
        "int-quantized",
        weights={**number, "strategy": "channel", "dynamic": False},
        activations={**number, "strategy": "token", "dynamic": True},
    )


@torch.no_grad()
def _quantise_into(weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write the codes, int8 of the shape of `weight`, and the scales, float32 [rows, 1].

    Raises ValueError, naming the row, for a weight that is NaN, infinite or above 2**127.
    """
    for tile in row_tiles(weight):
        values = weight[tile].to(torch.float32)
        largest = values.abs().amax(dim=1, keepdim=True)
        if not largest.amax() <= LARGEST_WEIGHT:
            row = tile.start + int((~(largest <= LARGEST_WEIGHT)).nonzero()[0, 0])
            raise ValueError(f"row {row} holds a weight that is NaN, infinite or too large for INT8")
        # A tensor as the divisor, because a GPU would replace division by a number with multiplication by its inverse.
        scale = largest.clamp_(min=SMALLEST_MAGNITUDE) / torch.full_like(largest, LARGEST_CODE)
        scales[tile].copy_(scale)
        codes[tile].copy_(values.div(scale).round_())


def _dequantise_into(codes: Tensor, scales: Tensor, weight: Tensor) -> None:
    weight.copy_(codes.to(torch.float32) * scales)


INT8_CHANNEL = NumberFormat(
    name="int8_channel",
    title="INT8 per channel",
    block=(1, WHOLE_ROW),
    codes=torch.int8,
    scales=torch.float32,
    scales_suffix="_scale",
    quantised_names=quantised_names,
    engine_config=_engine_config,
    quantise_into=_quantise_into,
    dequantise_into=_dequantise_into,
    # One launch reads the weights twice, each time twice the bytes of the codes, and writes the codes.
    pack_passes=5,
    check=_check,
)
