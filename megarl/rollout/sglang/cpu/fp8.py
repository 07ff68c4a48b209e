"""Block FP8 in SGLang on a CPU (0.5.23): its own layers and loaders, with another matmul.

SGLang multiplies FP8 codes only on CPUs with AMX, by kernels of a missing package that need them packed. Here codes and
scales stay where the loaders put them, as on a GPU, and are dequantised to the model's dtype for every matmul;
activations are not quantised. It is slow but correct, and the same on every CPU.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from converters.number_formats import FP8_BLOCK
from megarl.rollout.sglang.cpu.experts import multiply_by_decoded_experts

_FP8 = "sglang.srt.layers.quantization.fp8"


def register_hooks() -> None:
    """Register the hooks that give SGLang's FP8 layers a matmul on a CPU."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_FP8}.Fp8Config.get_supported_act_dtypes", with_float32, HookType.AFTER)
    for method, apply in (("Fp8LinearMethod", multiply), ("Fp8MoEMethod", multiply_by_experts)):
        HookRegistry.register(f"{_FP8}.{method}.process_weights_after_loading", keep_codes, HookType.REPLACE)
        HookRegistry.register(f"{_FP8}.{method}.apply", apply, HookType.REPLACE)


def with_float32(dtypes: list[torch.dtype], *_: Any) -> list[torch.dtype]:
    """Allow weights in block FP8 for a float32 model.

    SGLang 0.5.23 allows only bfloat16 and float16, as its GPU kernels do, on every device. In float32 an engine differs
    from transformers with the same codes only by rounding, so tests notice any other difference.
    """
    return [*dtypes, torch.float32]


def keep_codes(method: Any, _layer: Any) -> None:
    """Leave codes and scales as loaded; SGLang would assert that the CPU has AMX, and pack them."""
    if not method.block_quant:
        raise NotImplementedError("FP8 that is not in blocks, on a CPU")


def multiply(_method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Dequantise a matrix and multiply by it; replaces `Fp8LinearMethod.apply`."""
    return F.linear(x, FP8_BLOCK.dequantise(layer.weight.data, layer.weight_scale_inv.data, x.dtype), bias)


multiply_by_experts = multiply_by_decoded_experts(FP8_BLOCK)
"""`Fp8MoEMethod.apply`."""
