"""Block FP8: weights in e4m3 with one scale per block of 128 x 128, as DeepSeek-V3 was released (arXiv 2412.19437)."""

from converters.fp8.blocks import BLOCK, CODES, LARGEST_WEIGHT, Scratch, scales_shape
from converters.fp8.dequantise import dequantise_into
from converters.fp8.names import SCALES_SUFFIX, quantised_names, scales_of, unquantised_modules
from converters.fp8.quantisation_config import is_block_fp8, quantisation_config
from converters.fp8.quantise import quantise_into

__all__ = [
    "BLOCK",
    "CODES",
    "LARGEST_WEIGHT",
    "SCALES_SUFFIX",
    "Scratch",
    "dequantise_into",
    "is_block_fp8",
    "quantisation_config",
    "quantise_into",
    "quantised_names",
    "scales_of",
    "scales_shape",
    "unquantised_modules",
]
