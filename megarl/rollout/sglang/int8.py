"""INT8 per channel in SGLang 0.5.23, on any device: its own layers, which keep codes and scales as they were loaded.

SGLang has two forms of W8A8. Its compressed-tensors has experts for Ascend NPUs alone; `w8a8_int8` has them by Triton,
and is the one that megarl asks for. Both quantise activations, token by token. Both replace the parameters when weights
have come, and turn the matrices of linear layers: the new ones lack what SGLang's loader asks of a parameter, so that
it could load no others, and are turned back when the next update ends.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

_INT8 = "sglang.srt.layers.quantization.w8a8_int8"


def register_hooks() -> None:
    """Tell SGLang's registry of hooks those that leave parameters in INT8 in their places."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method in ("W8A8Int8LinearMethod", "W8A8Int8MoEMethod"):
        HookRegistry.register(f"{_INT8}.{method}.process_weights_after_loading", keep_codes, HookType.REPLACE)
    HookRegistry.register(f"{_INT8}.W8A8Int8LinearMethod.apply", multiply_by_columns, HookType.AROUND)


def keep_codes(_method: Any, _layer: Any) -> None:
    """Leave codes and scales as they were loaded: the kernel of experts reads them so, too."""


def multiply_by_columns(
    original: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Give the kernel of linear layers the transpose that it takes, as a view of the parameter."""
    return original(
        method, SimpleNamespace(weight=layer.weight.data.t(), weight_scale=layer.weight_scale.data), x, bias
    )
