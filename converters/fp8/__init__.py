"""Block FP8: weights in e4m3 with one scale per block of 128 x 128, as DeepSeek-V3 was released (arXiv 2412.19437)."""

from converters.fp8.blocks import BLOCK, LARGEST_WEIGHT, Scratch, scales_shape
from converters.fp8.dequantise import dequantise_into
from converters.fp8.names import quantised_names, scales_of
from converters.fp8.quantisation_config import is_block_fp8, quantisation_config
from converters.fp8.quantise import quantise_into

__all__ = [
    "BLOCK",
    "LARGEST_WEIGHT",
    "Scratch",
    "dequantise_into",
    "is_block_fp8",
    "quantisation_config",
    "quantise_into",
    "quantised_names",
    "scales_of",
    "scales_shape",
]
