"""Where an SGLang worker keeps the HuggingFace tensors: its model's own `load_weights`, traced.

Weights may be written straight into parameters only where SGLang keeps them as they were loaded. Some kernels permute,
pack or quantise them afterwards; so what may be written is a list, and all else goes through SGLang's loader, after
which SGLang repeats these steps.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from converters.layout import Shape
from converters.layouts.traced_layout import LoadTrace
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
        return "the expert kernel keeps it in an order of its own"
    return _keeps_matrix(module)


_KEPT: Mapping[str, Callable[[Any], str | None]] = {
    "UnquantizedLinearMethod": _keeps_matrix,
    "UnquantizedEmbeddingMethod": lambda _module: None,
    "UnquantizedFusedMoEMethod": _keeps_experts,
}
"""Name of the class of a module's `quant_method` -> why its parameters are not what was loaded; None if they are."""


def loaded_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that `model.load_weights` fills, by name; one that modules share has the first name only."""
    return dict(model.named_parameters())


def trace_model(model: Any, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> LoadTrace:
    """See `trace_load_weights`; `model` is that of this worker."""
    return trace_load_weights(model, loaded_parameters(model), _reason, hf_shapes, hf_dtypes)


def _reason(module: nn.Module) -> str | None:
    method = getattr(module, "quant_method", None)
    if method is None:
        return None
    name = type(method).__name__
    return _KEPT[name](module) if name in _KEPT else f"{name} may keep it in another form than it is loaded in"
