"""The model families, one file each; their building blocks are in the parent folder."""

from collections.abc import Callable, Mapping

from converters.architectures.families import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    glm4_moe,
    llama,
    mixtral,
    qwen2,
    qwen3,
)
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.weight_map import Architecture

FAMILIES: Mapping[str, Callable[[HuggingFaceConfig], Architecture]] = {
    model_type: family.read
    for family in (llama, qwen2, qwen3, mixtral, gemma2, glm4_moe, deepseek_v2, deepseek_v3)
    for model_type in family.MODEL_TYPES
}
"""By the `model_type` of config.json."""
