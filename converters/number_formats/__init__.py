"""Number formats: forms other than the trained one in which engines hold matrices. A file says all of one format."""

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
"""By the names that `rollout.weights` takes, beside `AS_TRAINED`, which is none of them."""


def number_format(name: str) -> NumberFormat | None:
    """The format of this name, None where weights stay as they are trained. Raises UserError for another name."""
    known = (AS_TRAINED, *NUMBER_FORMATS)
    if name not in known:
        raise UserError(f"weights in {name!r}: it is none of {', '.join(known)}{did_you_mean(name, known)}")
    return NUMBER_FORMATS.get(name)
