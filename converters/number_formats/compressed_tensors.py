"""The `quantization_config` of compressed-tensors, which vLLM, SGLang and transformers read."""

from collections.abc import Mapping
from typing import Any

from converters.architectures import Architecture
from converters.fp8 import unquantised_modules


def compressed_tensors_config(
    architecture: Architecture, layout: str, *, weights: Mapping[str, Any], activations: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One scheme for all linear layers and experts, except those whose matrix is not among the `quantised_names`.

    `layout` is the `format` of compressed-tensors: how codes and scales are stored in a checkpoint. Activations without
    a scheme are not quantised.
    """
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": dict(weights),
                "input_activations": activations and dict(activations),
                "format": layout,
            }
        },
        "ignore": unquantised_modules(architecture),
    }
