"""MXFP8 scales in vLLM 0.32 before the first refit, as colocated engines start without weights."""

from collections.abc import Callable, Sequence
from typing import Any

_ONE = 127
"""The byte of E8M0 that stands for 1."""


def begin_with_scales_of_one() -> None:
    """Initialise MXFP8 scales to 1 in an engine that starts without weights.

    vLLM initialises only floating-point parameters, and these are bytes: uninitialised memory, which may stand for NaN
    or 2^127. Latent attention dequantises its `kv_b_proj` right away, and vLLM runs the model before a refit, to
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
