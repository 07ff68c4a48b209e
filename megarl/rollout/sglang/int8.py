"""INT8 per channel in SGLang 0.5.23 on any device: its own layers, with codes and scales kept as loaded.

SGLang has two forms of W8A8. Its compressed-tensors form has experts only for Ascend NPUs; `w8a8_int8`, which megarl
uses, has them in Triton. Both quantise activations per token. After loading, both replace the parameters and transpose
the matrices of linear layers. The new parameters lack attributes that SGLang's loader needs, so no weights could be
loaded again, and the next update would transpose the matrices back.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

_INT8 = "sglang.srt.layers.quantization.w8a8_int8"


def register_hooks() -> None:
    """Register the hooks that leave INT8 parameters in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method in ("W8A8Int8LinearMethod", "W8A8Int8MoEMethod"):
        HookRegistry.register(f"{_INT8}.{method}.process_weights_after_loading", keep_codes, HookType.REPLACE)
    HookRegistry.register(f"{_INT8}.W8A8Int8LinearMethod.apply", multiply_by_columns, HookType.AROUND)


def keep_codes(_method: Any, _layer: Any) -> None:
    """Leave codes and scales as loaded; the experts' kernel reads them like that, too."""


def multiply_by_columns(
    original: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Pass the linear kernel the transpose that it expects, as a view of the parameter."""
    return original(
        method, SimpleNamespace(weight=layer.weight.data.t(), weight_scale=layer.weight_scale.data), x, bias
    )
