"""Block FP8 with power-of-two scales (UE8M0), as in released DeepSeek-V3.1 and in DeepGEMM's kernels.

The rule is DeepGEMM's `per_block_cast_to_fp8` with `use_ue8m0` (deep_gemm/utils/math.py). It differs from block FP8 in
that a block's largest magnitude is raised to at least 1e-4, and its scale is rounded up to the next power of two,
stored as a float32.

Engines that use DeepGEMM requantise what they load: they dequantise it and apply this rule to the result. Weights in
plain block FP8 are then rounded a second time. Weights in this format stay bitwise the same: where the rule leaves 224
as a block's largest code, half the scale and twice the codes are used, which are the same numbers and what the engine
would use.
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
