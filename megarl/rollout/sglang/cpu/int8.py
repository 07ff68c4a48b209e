"""INT8 per channel in SGLang on a CPU (0.5.23): its own layers and loaders, with another multiplication under them.

SGLang multiplies codes on CPUs with AMX or of Arm, by kernels of a package that is not there. Here codes and scales
stay where the loaders put them, as on a GPU (`megarl.rollout.sglang.int8`), and become numbers of the model's type for
every multiplication; activations are not quantised.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from converters.number_formats import INT8_CHANNEL
from megarl.rollout.sglang.cpu.experts import multiply_by_decoded_experts
from megarl.rollout.sglang.cpu.fp8 import with_float32

_INT8 = "sglang.srt.layers.quantization.w8a8_int8"


def register_hooks() -> None:
    """Tell SGLang's registry of hooks those that give its INT8 layers a multiplication on a CPU."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_INT8}.W8A8Int8Config.get_supported_act_dtypes", with_float32, HookType.AFTER)
    HookRegistry.register(f"{_INT8}.W8A8Int8LinearMethod.apply", multiply, HookType.REPLACE)
    HookRegistry.register(f"{_INT8}.W8A8Int8MoEMethod.apply", multiply_by_experts, HookType.REPLACE)


def multiply(_method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Decode a matrix, whose transpose the kernels of GPUs take, and multiply by it: `W8A8Int8LinearMethod.apply`."""
    return F.linear(x, INT8_CHANNEL.dequantise(layer.weight.t(), layer.weight_scale, x.dtype), bias)


multiply_by_experts = multiply_by_decoded_experts(INT8_CHANNEL)
"""`W8A8Int8MoEMethod.apply`."""
