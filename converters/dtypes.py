"""Names of the types of tensors."""

from collections.abc import Mapping

import torch

SHORT_NAMES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Name of a type in recipes and on command lines -> the type."""


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of a type as config.json and people have it.

    Example: dtype_name(torch.bfloat16) is "bfloat16"
    """
    return str(dtype).removeprefix("torch.")


def short_name(dtype: torch.dtype | str) -> str:
    """The name of a type as recipes have it, or its own where they have none.

    Example: short_name(torch.bfloat16) is "bf16"
    """
    name = dtype_name(dtype)
    return next((short for short, each in SHORT_NAMES.items() if dtype_name(each) == name), name)
