"""Finds where an SGLang worker keeps the HuggingFace tensors, by tracing its model's own `load_weights`.

Weights may be written directly into parameters only if SGLang keeps them as loaded. Some kernels permute, pack or
quantise them afterwards. So there is a list of what may be written, and everything else goes through SGLang's loader,
after which SGLang repeats these steps.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from converters.layout import Shape
from converters.layouts.traced_layout import LoadTrace
from megarl.rollout.protocol import UpdateError
from megarl.rollout.tracing import trace_load_weights


def _keeps_matrix(_module: nn.Module) -> str | None:
    from sglang.srt.layers.quantization import unquant

    packed = unquant._is_cpu and unquant._is_cpu_amx_available
    return "the CPU backend multiplies by a packed copy of it" if packed else None


def _keeps_experts(module: Any) -> str | None:
    from sglang.srt.layers.quantization import unquant

    if unquant._use_aiter:
        return "the expert kernel of AMD's GPUs keeps it in an order of its own"
    if module.quant_method.use_triton_kernels or module.quant_method.use_flashinfer_trtllm_moe:
        return (
            "the expert kernel keeps it in an order of its own, which rollout.engine_args.moe_runner_backend=triton"
            " does not"
        )
    return _keeps_matrix(module)


def _keeps_codes(module: Any) -> str | None:
    method = module.quant_method
    if method.use_marlin or method.block_fp8_as_mxfp8:
        return "the kernel multiplies by a packed copy of it"
    # A partial if the scales of activations are powers of two.
    multiply = method.w8a8_block_fp8_linear
    kernel = getattr(multiply, "func", multiply).__name__
    return None if kernel in _KEEPING else f"the kernel {kernel} may keep it in an order of its own"


def _keeps_codes_of_experts(module: Any) -> str | None:
    method = module.quant_method
    if method.is_fp4_expert:
        return "the experts are in FP4"
    backend = method.get_moe_runner_backend(module)
    # For FlashInfer the loader puts up before gate, which the trace reproduces; nothing is changed afterwards.
    if backend.is_triton() or backend.is_flashinfer_trtllm() or backend.is_flashinfer_trtllm_routed():
        return None
    return f"the expert kernel {backend.value} may keep it in an order of its own"


def _keeps_blocks(keeps: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """Wrap `keeps` with the checks that all FP8 layers share."""

    def reason(module: Any) -> str | None:
        from sglang.srt.layers.quantization import fp8
        from sglang.srt.utils import use_intel_amx_backend

        method = module.quant_method
        if not method.block_quant or method.use_mxfp8:
            return "SGLang makes its scales from others when it is loaded"
        if fp8._is_fp8_fnuz or fp8._use_aiter:
            return "it becomes the FP8 of AMD's GPUs when it is loaded"
        if _packed_scales(module):
            return "SGLang packs its scales for DeepGEMM when it is loaded"
        return "the CPU backend multiplies by a packed copy of it" if use_intel_amx_backend(module) else keeps(module)

    return reason


_KEEPING = (
    "triton_w8a8_block_fp8_linear",
    "cutlass_w8a8_block_fp8_linear_with_fallback",
    # It may round scales on loading, and marks those that it has rounded.
    "deepgemm_w8a8_block_fp8_linear_with_fallback",
)
"""Functions that multiply by block-quantised weights as loaded. On a CPU the first is chosen but never called."""

_OPTIONAL = "_skip_weight_check"

_KEPT: Mapping[str, Callable[[Any], str | None]] = {
    "UnquantizedLinearMethod": _keeps_matrix,
    "UnquantizedEmbeddingMethod": lambda _module: None,
    "UnquantizedFusedMoEMethod": _keeps_experts,
    "Fp8LinearMethod": _keeps_blocks(_keeps_codes),
    "Fp8MoEMethod": _keeps_blocks(_keeps_codes_of_experts),
    # Kept by `megarl.rollout.sglang.int8`.
    "W8A8Int8LinearMethod": lambda _module: None,
    "W8A8Int8MoEMethod": lambda _module: None,
}
"""Class name of a module's `quant_method` -> function that says why the parameters are not as loaded; None if they are.
"""


def check_loadable(model: nn.Module) -> None:
    """Raise UpdateError for a model that SGLang's loader can fill only once.

    On Blackwell SGLang 0.5.23 rounds FP8 scales to powers of two and replaces the parameter by packed ones, four per
    integer and one per row. It never restores the original parameter, and its loader asserts the original shape.
    """
    for name, module in model.named_modules():
        if _packed_scales(module):
            raise UpdateError(
                f"SGLang packed the scales of {name} for DeepGEMM on this GPU, and its loader takes no others in their"
                " place: set rollout.engine_args.fp8_gemm_runner_backend=triton, and moe_runner_backend=triton where"
                " these are of experts"
            )


def _packed_scales(module: nn.Module) -> list[str]:
    """The names of an FP8 layer's parameters whose scales are no longer as loaded."""
    parameters = module.named_parameters(recurse=False)
    return [name for name, each in parameters if getattr(each, "format_ue8m0", False)]


def loaded_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that `model.load_weights` fills, by name; a shared one appears only under its first name.

    Parameters that SGLang marks as optional in a checkpoint are left out: KV cache scales of FP8 models.
    """
    return {name: each for name, each in model.named_parameters() if not getattr(each, _OPTIONAL, False)}


def trace_model(model: Any, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> LoadTrace:
    """See `trace_load_weights`; `model` is this worker's."""
    return trace_load_weights(model, loaded_parameters(model), _reason, hf_shapes, hf_dtypes)


def _reason(module: nn.Module) -> str | None:
    method = getattr(module, "quant_method", None)
    if method is None:
        return None
    name = type(method).__name__
    return _KEPT[name](module) if name in _KEPT else f"{name} may keep it in another form than it is loaded in"
