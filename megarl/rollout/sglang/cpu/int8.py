"""INT8 per channel in SGLang on a CPU (0.5.23): its own layers and loaders, with another matmul.

SGLang multiplies INT8 codes only on Arm CPUs and on those with AMX, by kernels of a missing package. Here codes and
scales stay where the loaders put them, as on a GPU (`megarl.rollout.sglang.int8`), and are dequantised to the model's
dtype for every matmul; activations are not quantised.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from converters.number_formats import INT8_CHANNEL
from megarl.rollout.sglang.cpu.experts import multiply_by_decoded_experts
from megarl.rollout.sglang.cpu.fp8 import with_float32

_INT8 = "sglang.srt.layers.quantization.w8a8_int8"


def register_hooks() -> None:
    """Register the hooks that give SGLang's INT8 layers a matmul on a CPU."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_INT8}.W8A8Int8Config.get_supported_act_dtypes", with_float32, HookType.AFTER)
    HookRegistry.register(f"{_INT8}.W8A8Int8LinearMethod.apply", multiply, HookType.REPLACE)
    HookRegistry.register(f"{_INT8}.W8A8Int8MoEMethod.apply", multiply_by_experts, HookType.REPLACE)


def multiply(_method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Dequantise a matrix, stored transposed for GPU kernels, and multiply; replaces `W8A8Int8LinearMethod.apply`."""
    return F.linear(x, INT8_CHANNEL.dequantise(layer.weight.t(), layer.weight_scale, x.dtype), bias)


multiply_by_experts = multiply_by_decoded_experts(INT8_CHANNEL)
"""`W8A8Int8MoEMethod.apply`."""
