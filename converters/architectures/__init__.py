"""The architectures that can be converted, one file per family."""

from collections.abc import Callable, Mapping
from typing import Any

from converters.architectures import deepseek_v2, deepseek_v3, gemma2, glm4_moe, llama, mixtral, qwen2, qwen3
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.value_head import with_head, with_value_head
from converters.architectures.weight_map import Architecture, Dimension, Head, Kind, Parameter, Part
from converters.errors import UserError

__all__ = [
    "FAMILIES",
    "Architecture",
    "Dimension",
    "Head",
    "Kind",
    "Parameter",
    "Part",
    "read_architecture",
    "with_head",
    "with_value_head",
]

FAMILIES: Mapping[str, Callable[[HuggingFaceConfig], Architecture]] = {
    model_type: family.read
    for family in (llama, qwen2, qwen3, mixtral, gemma2, glm4_moe, deepseek_v2, deepseek_v3)
    for model_type in family.MODEL_TYPES
}


def read_architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """The Megatron model of the config.json `hf_config`.

    Raises UserError for a model type or a field that is not supported, or a field that is missing.
    """
    config = HuggingFaceConfig(hf_config)
    model_type = config["model_type"]
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"config.json has model_type {model_type!r}, which is not supported: {known} are")
    return FAMILIES[model_type](config)
