"""Finds where an engine's model keeps the HuggingFace tensors, by tracing its own `load_weights`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from converters.layout import Shape
from converters.layouts.traced_layout import LoadTrace, fill_padding, trace_loading


def trace_load_weights(
    model: Any,
    parameters: Mapping[str, Tensor],
    reason: Callable[[nn.Module], str | None],
    hf_shapes: Mapping[str, Shape],
    hf_dtypes: Mapping[str, torch.dtype],
) -> LoadTrace:
    """Trace where the tensors of a HuggingFace checkpoint are stored in the `parameters` of `model`.

    `reason` returns why a module's parameters may not be written directly, or None. Nothing is written except the
    constants that the loader puts into padding, such as rows beyond the vocabulary, and those only if everything could
    be traced.
    """
    excluded = _excluded(model, parameters, reason)
    trace = trace_loading(model.load_weights, parameters, hf_shapes, hf_dtypes, excluded=excluded)
    if not trace.untraced:
        fill_padding(trace, parameters)
    return trace


def _excluded(
    model: nn.Module, parameters: Mapping[str, Tensor], reason: Callable[[nn.Module], str | None]
) -> dict[str, str]:
    """Map parameters that may not be written directly to the reason."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    excluded: dict[str, str] = {}
    for module in model.modules():
        if why := reason(module):
            own = (names.get(id(parameter)) for parameter in module.parameters(recurse=False))
            excluded |= {name: why for name in own if name}
    return excluded
