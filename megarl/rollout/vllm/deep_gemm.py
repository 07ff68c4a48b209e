"""Weights in block FP8 that vLLM multiplies by DeepGEMM's kernels: whether they stay as they were loaded.

vLLM 0.32 requantises them with scales that are powers of two, unless VLLM_USE_DEEP_GEMM_E8M0=0, and DeepGEMM then packs
the scales for Blackwell: four to a number, one for each row. On Hopper it multiplies by them as they are.
"""

import torch
from torch import Tensor
from vllm.config import ModelConfig

from converters.number_formats import FP8_BLOCK_UE8M0
from megarl.rollout.kind import QUANTISATION

_SCALES = "scale_fmt"


def changes(codes: Tensor, scales: Tensor, config: ModelConfig, *, rounds_scales: bool) -> str | None:
    """Why `codes` and `scales` of a layer, or of all its experts, are not what was loaded; None if they are.

    `rounds_scales` says whether vLLM makes powers of two of the scales.
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
