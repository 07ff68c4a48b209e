"""The supported architectures: `families`, and the building blocks that they share."""

from collections.abc import Mapping
from typing import Any

from converters.architectures.families import FAMILIES
from converters.architectures.hf_config import MTP_LAYERS, HuggingFaceConfig, without_mtp
from converters.architectures.lora import ALL_LINEAR, Lora, adapter_architecture
from converters.architectures.value_head import with_head, with_value_head
from converters.architectures.weight_map import Architecture, Dimension, Head, Kind, Parameter, Part
from converters.errors import UserError

__all__ = [
    "ALL_LINEAR",
    "FAMILIES",
    "MTP_LAYERS",
    "Architecture",
    "Dimension",
    "Head",
    "Kind",
    "Lora",
    "Parameter",
    "Part",
    "adapter_architecture",
    "read_architecture",
    "with_head",
    "with_value_head",
    "without_mtp",
]


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
