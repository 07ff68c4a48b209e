"""Number formats in which engines can hold matrices, other than the trained one. Each file describes one format."""

from collections.abc import Mapping

from converters.errors import UserError, did_you_mean
from converters.number_formats.fp8_block import FP8_BLOCK
from converters.number_formats.fp8_block_ue8m0 import FP8_BLOCK_UE8M0
from converters.number_formats.int8_channel import INT8_CHANNEL
from converters.number_formats.mxfp8 import MXFP8
from converters.number_formats.number_format import NumberFormat
from converters.number_formats.nvfp4 import NVFP4

__all__ = [
    "AS_TRAINED",
    "FP8_BLOCK",
    "FP8_BLOCK_UE8M0",
    "INT8_CHANNEL",
    "MXFP8",
    "NUMBER_FORMATS",
    "NVFP4",
    "NumberFormat",
    "number_format",
]

AS_TRAINED = "as_trained"
NUMBER_FORMATS: Mapping[str, NumberFormat] = {
    each.name: each for each in (FP8_BLOCK, FP8_BLOCK_UE8M0, INT8_CHANNEL, MXFP8, NVFP4)
}
"""Formats by the names that `rollout.weights` accepts; `AS_TRAINED` is the name for none of them."""


def number_format(name: str) -> NumberFormat | None:
    """Look up the format of this name; None if weights stay as trained. Raises UserError for any other name."""
    known = (AS_TRAINED, *NUMBER_FORMATS)
    if name not in known:
        raise UserError(f"weights in {name!r}: it is none of {', '.join(known)}{did_you_mean(name, known)}")
    return NUMBER_FORMATS.get(name)
