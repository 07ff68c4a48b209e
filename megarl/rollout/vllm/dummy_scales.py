"""Scales of MXFP8 in vLLM 0.32 before the first refit: engines beside their trainer start without weights."""

from collections.abc import Callable, Sequence
from typing import Any

_ONE = 127
"""The byte of E8M0 that stands for 1."""


def begin_with_scales_of_one() -> None:
    """Have scales of MXFP8 be 1 where an engine starts without weights.

    vLLM fills parameters of floating numbers, and these are bytes: they are what lay in memory, which may be NaN or
    2^127. Latent attention decodes its `kv_b_proj` right away, and vLLM computes with all of them before a refit, to
    measure memory and to capture graphs.
    """
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_mxfp8 as experts,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Mxfp8 as Linear

    _begin_with_one(Linear, ["weight_scale"])
    _begin_with_one(experts.CompressedTensorsW8A8Mxfp8MoEMethod, ["w13_weight_scale", "w2_weight_scale"])


def _begin_with_one(method: Any, names: Sequence[str]) -> None:
    original: Callable[..., None] = method.create_weights

    def create_weights(self: Any, layer: Any, *arguments: Any, **options: Any) -> None:
        original(self, layer, *arguments, **options)
        for name in names:
            getattr(layer, name).dummy_weight_value = _ONE

    method.create_weights = create_weights
