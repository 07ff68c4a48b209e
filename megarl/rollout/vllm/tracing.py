"""Finds where a vLLM worker keeps the HuggingFace tensors, by tracing its model's own `load_weights`.

Weights may be written directly into parameters only if vLLM keeps them as loaded. Some kernels permute, pack or
quantise them afterwards, which the loader does not reveal. So there is a list of what may be written, and everything
else goes through vLLM's reload, which repeats these steps.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import vllm
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.kernels.linear import EmulationMxfp8LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel, CPUInt8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.flashinfer import FlashInferFp8DeepGEMMDynamicBlockScaledKernel
from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_int8 import (  # noqa: E501
    CompressedTensorsW8A8Int8MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_mxfp8 import (  # noqa: E501
    CompressedTensorsW8A8Mxfp8MoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

from converters.errors import UserError
from converters.layout import Shape
from converters.layouts.traced_layout import LoadTrace
from megarl.rollout.cpu_linear import linear
from megarl.rollout.identical_layers import expand_trace, group_identical_layers, tensors_of_layers
from megarl.rollout.tracing import trace_load_weights
from megarl.rollout.vllm import cpu, deep_gemm
from megarl.rollout.vllm.kind import VLLM
from megarl.rollout.vllm.made_parameters import as_made
from megatron_ext import device


def _multiplies_raw_weight(module: Any, _config: ModelConfig) -> str | None:
    # Stock vLLM on a CPU multiplies by a packed copy.
    packed = getattr(module, "cpu_linear", linear) not in (linear, F.linear)
    return "the CPU backend multiplies by a packed copy of it" if packed else None


def _keeps_experts(module: Any, _config: ModelConfig) -> str | None:
    backend = module.quant_method.unquantized_backend
    return _keeps_as_loaded(module, backend, UnquantizedMoeBackend, cpu.experts.expert_weights_are_kept)


def _keeps_codes(module: Any, config: ModelConfig) -> str | None:
    kernel = type(module.quant_method.fp8_linear)
    # These two exist only on GPUs. The CPU's class packs, unless it was corrected.
    if kernel in (TritonFp8BlockScaledMMKernel, CutlassFp8BlockScaledMMKernel):
        return None
    if kernel is CPUFp8BlockScaledMMKernel and cpu.fp8.codes_are_kept():
        return None
    if kernel in (DeepGemmFp8BlockScaledMMKernel, FlashInferFp8DeepGEMMDynamicBlockScaledKernel):
        # FlashInfer's kernel handles small batches itself, and has DeepGEMM prepare the weight for both.
        of_layer = module.quant_method.fp8_linear
        rounds = getattr(of_layer, "fallback", of_layer).use_deep_gemm_e8m0
        return deep_gemm.changes(module.weight, module.weight_scale_inv, config, rounds_scales=rounds)
    return f"the kernel {kernel.__name__} may keep it in an order of its own{_other('linear_backend', 'cutlass')}"


def _keeps_codes_of_experts(module: Any, config: ModelConfig) -> str | None:
    if module.quant_method.fp8_backend in (Fp8MoeBackend.DEEPGEMM, Fp8MoeBackend.BATCHED_DEEPGEMM):
        # w2 is treated like w13.
        codes, scales = module.w13_weight, module.w13_weight_scale_inv
        changes = deep_gemm.changes(codes, scales, config, rounds_scales=is_deep_gemm_e8m0_used())
        return _balanced(module) or changes
    return _keeps_as_loaded(module, module.quant_method.fp8_backend, Fp8MoeBackend, cpu.fp8.codes_are_kept)


def _keeps_compressed(module: Any, _config: ModelConfig) -> str | None:
    kernel = type(module.scheme.kernel) if hasattr(module.scheme, "kernel") else type(module.scheme)
    # GPU kernels transpose INT8 codes, and shuffle or unpack MXFP8 codes.
    on_cpu = kernel in (CPUInt8ScaledMMLinearKernel, EmulationMxfp8LinearKernel)
    if on_cpu and cpu.number_formats.codes_are_kept():
        return None
    return f"the kernel {kernel.__name__} may keep it in an order of its own"


def _keeps_whole_numbers_of_experts(module: Any, _config: ModelConfig) -> str | None:
    return _keeps_as_loaded(module, module.quant_method.int8_backend, Int8MoeBackend, cpu.number_formats.codes_are_kept)


def _keeps_mxfp8_of_experts(module: Any, _config: ModelConfig) -> str | None:
    backend = module.quant_method.fp8_backend
    if backend is Fp8MoeBackend.CPU:
        return _keeps_as_loaded(module, backend, Fp8MoeBackend, cpu.number_formats.codes_are_kept)
    return f"the expert kernel {backend.value} may keep it in an order of its own"


def _keeps_as_loaded(module: Any, backend: Any, backends: Any, is_kept_on_cpu: Callable[[], bool]) -> str | None:
    """Why experts are not kept as loaded by this one of the `backends`; None if they are."""
    if reason := _balanced(module):
        return reason
    if backend in (backends.TRITON, getattr(backends, "BATCHED_TRITON", None)) or (
        backend is backends.CPU and is_kept_on_cpu()
    ):
        return None
    return f"the expert kernel {backend.value} may keep it in an order of its own{_other('moe_backend', 'triton')}"


def _other(argument: str, kernels: str) -> str:
    """The advice to choose other kernels on a GPU."""
    return "" if device.backend() == "gloo" else f", which rollout.engine_args.{argument}={kernels} does not"


def _balanced(module: Any) -> str | None:
    balances = module.moe_config.moe_parallel_config.enable_eplb
    return "the load balancer of the experts moves them" if balances else None


_KEPT: Mapping[type, Callable[[Any, ModelConfig], str | None]] = {
    UnquantizedLinearMethod: _multiplies_raw_weight,
    UnquantizedEmbeddingMethod: _multiplies_raw_weight,
    UnquantizedFusedMoEMethod: _keeps_experts,
    Fp8LinearMethod: _keeps_codes,
    Fp8MoEMethod: _keeps_codes_of_experts,
    CompressedTensorsLinearMethod: _keeps_compressed,
    CompressedTensorsW8A8Int8MoEMethod: _keeps_whole_numbers_of_experts,
    CompressedTensorsW8A8Mxfp8MoEMethod: _keeps_mxfp8_of_experts,
}
"""Class of a module's `quant_method` -> function that says why the parameters are not as loaded; None if they are."""

_DERIVED: Mapping[type[nn.Module], Callable[[Any, ModelConfig], None]] = {
    # Its own parameters are views of the weight of its `kv_b_proj`, or copies of it for FP8.
    MLAAttention: lambda module, config: module.process_weights_after_loading(config.dtype),
}
"""Modules whose own parameters are not loaded -> function that computes them from other weights."""


_IN_ANOTHER_FORM = "vLLM keeps it in another form than it is loaded in"


def check_version() -> None:
    """Raise UserError for a vLLM version whose weight handling is not known."""
    if not VLLM.knows_layouts_of(vllm.__version__):
        raise UserError(
            f"vLLM {vllm.__version__} is installed, and how it keeps weights is known for"
            f" {', '.join(VLLM.layout_versions)} only: install one of these"
        )


def loaded_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that `model.load_weights` fills, by name; a shared one appears only under its first name."""
    derived = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, tuple(_DERIVED))
        for parameter in module.parameters(recurse=False)
    }
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in derived}


def trace_model(
    model: Any, config: ModelConfig, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]
) -> LoadTrace:
    """See `trace_load_weights`; `model` is this worker's.

    Raises UserError for a version of vLLM that is not supported.
    """
    with _loadable(model, config) as (parameters, reason):
        return trace_load_weights(model, parameters, reason, hf_shapes, hf_dtypes)


def trace_distinct_layers(
    model: Any, config: ModelConfig, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]
) -> LoadTrace:
    """Return the same as `trace_model`, but trace only one layer of each kind (`identical_layers`)."""
    with _loadable(model, config) as (parameters, reason):
        identical = group_identical_layers(model, parameters, reason, hf_shapes, hf_dtypes)
        few, some = tensors_of_layers(parameters, identical), tensors_of_layers(hf_shapes, identical)
        return expand_trace(trace_load_weights(model, few, reason, some, hf_dtypes), identical, parameters)


@contextmanager
def _loadable(
    model: nn.Module, config: ModelConfig
) -> Iterator[tuple[dict[str, Tensor], Callable[[nn.Module], str | None]]]:
    """Yield the parameters as they were when the model was loaded, and why a module's may not be written directly."""
    check_version()
    reasons = {module: _reason(module, config) for module in model.modules()}
    names = loaded_parameters(model).keys()
    with as_made(model) as others:
        reasons |= {module: reasons[module] or _IN_ANOTHER_FORM for module in others}
        # Without parameters that existed only during loading.
        yield {name: each for name, each in loaded_parameters(model).items() if name in names}, reasons.get


def after_direct_write(model: nn.Module, config: ModelConfig) -> None:
    """Recompute everything that vLLM derives from weights, after they were written directly into the parameters."""
    with torch.no_grad():
        for module in model.modules():
            for kind, derive in _DERIVED.items():
                if isinstance(module, kind):
                    derive(module, config)


def _reason(module: nn.Module, config: ModelConfig) -> str | None:
    method = getattr(module, "quant_method", None)
    if method is None:
        processed = hasattr(module, "process_weights_after_loading") and not isinstance(module, tuple(_DERIVED))
        return f"{type(module).__name__} may change it after loading" if processed else None
    if type(method) not in _KEPT:
        return f"{type(method).__name__} may keep it in another form than it is loaded in"
    return _KEPT[type(method)](module, config)
