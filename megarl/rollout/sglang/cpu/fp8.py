"""Block FP8 in SGLang on a CPU (0.5.23): its own layers and loaders, with another multiplication under them.

SGLang multiplies codes on CPUs with AMX only, by kernels of a package that is not there, and packs them for that. Here
codes and scales stay where the loaders put them, as on a GPU, and become numbers of the model's type for every
multiplication; activations are not quantised. It is slow and right, and the same on every CPU.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from converters.number_formats import FP8_BLOCK
from megarl.rollout.sglang.cpu.experts import multiply_by_decoded_experts

_FP8 = "sglang.srt.layers.quantization.fp8"


def register_hooks() -> None:
    """Tell SGLang's registry of hooks those that give its FP8 layers a multiplication on a CPU."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_FP8}.Fp8Config.get_supported_act_dtypes", with_float32, HookType.AFTER)
    for method, apply in (("Fp8LinearMethod", multiply), ("Fp8MoEMethod", multiply_by_experts)):
        HookRegistry.register(f"{_FP8}.{method}.process_weights_after_loading", keep_codes, HookType.REPLACE)
        HookRegistry.register(f"{_FP8}.{method}.apply", apply, HookType.REPLACE)


def with_float32(dtypes: list[torch.dtype], *_: Any) -> list[torch.dtype]:
    """Let a model in float32 have weights in block FP8.

    SGLang 0.5.23 has the list of its GPU kernels, bfloat16 and float16, for every device. In float32 an engine differs
    from the same codes in transformers by rounding alone, so that tests see everything else.
    """
    return [*dtypes, torch.float32]


def keep_codes(method: Any, _layer: Any) -> None:
    """Leave codes and scales as they were loaded, where SGLang asserts that the CPU has AMX, and packs them."""
    if not method.block_quant:
        raise NotImplementedError("FP8 that is not in blocks, on a CPU")


def multiply(_method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Decode a matrix and multiply by it: `Fp8LinearMethod.apply`."""
    return F.linear(x, FP8_BLOCK.dequantise(layer.weight.data, layer.weight_scale_inv.data, x.dtype), bias)


multiply_by_experts = multiply_by_decoded_experts(FP8_BLOCK)
"""`Fp8MoEMethod.apply`."""
