"""Block FP8 with scales that are powers of two (UE8M0), as DeepSeek-V3.1 was released and DeepGEMM multiplies.

The rule is DeepGEMM's `per_block_cast_to_fp8` with `use_ue8m0` (deep_gemm/utils/math.py): as block FP8, but that the
largest magnitude of a block counts as 1e-4 at least, and that its scale is rounded up to the next power of two, kept as
a float32.

Engines that multiply by DeepGEMM requantise what they load: they decode it and apply this rule to the result. Weights
in block FP8 are rounded a second time then. These stay as they are, to the bit: where the rule leaves 224 as the
largest code of a block, half the scale and twice the codes are taken, the same numbers, as the engine would.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from converters.architectures import Architecture
from converters.fp8 import quantisation_config, quantise_into
from converters.number_formats.fp8_block import FP8_BLOCK, check_blocks

_NAME = "fp8_block_ue8m0"


def _engine_config(architecture: Architecture) -> dict[str, Any]:
    return {**quantisation_config(architecture), "scale_fmt": "ue8m0"}


FP8_BLOCK_UE8M0 = replace(
    FP8_BLOCK,
    name=_NAME,
    title="block FP8 with powers of two",
    engine_config=_engine_config,
    quantise_into=partial(quantise_into, power_of_two=True),
    check=partial(check_blocks, _NAME),
)
