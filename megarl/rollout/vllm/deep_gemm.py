"""Tells whether block FP8 weights for DeepGEMM's kernels stay as they were loaded.

vLLM 0.32 requantises them to power-of-two scales, unless VLLM_USE_DEEP_GEMM_E8M0=0. On Blackwell DeepGEMM then packs
the scales, four per integer and one per row; on Hopper it uses them as they are.
"""

import torch
from torch import Tensor
from vllm.config import ModelConfig

from converters.number_formats import FP8_BLOCK_UE8M0
from megarl.rollout.kind import QUANTISATION

_SCALES = "scale_fmt"


def changes(codes: Tensor, scales: Tensor, config: ModelConfig, *, rounds_scales: bool) -> str | None:
    """Why `codes` and `scales` of a layer, or of all its experts, are not as loaded; None if they are.

    `rounds_scales` says whether vLLM rounds the scales to powers of two.
    """
    if scales.dtype is not torch.float32 or scales.dim() != codes.dim():
        return "DeepGEMM packs its scales for this GPU"
    held = getattr(config.hf_config, QUANTISATION, None) or {}
    if rounds_scales and held.get(_SCALES) != "ue8m0":
        return (
            "vLLM makes powers of two of its scales for DeepGEMM; they are that from the start with"
            f" rollout.weights={FP8_BLOCK_UE8M0.name}"
        )
    return None
