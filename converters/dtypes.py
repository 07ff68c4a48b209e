"""Names of tensor dtypes."""

from collections.abc import Mapping

import torch

SHORT_NAMES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Name of a dtype in recipes and on command lines -> the dtype."""


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of a dtype in config.json and in messages.

    Example: dtype_name(torch.bfloat16) is "bfloat16"
    """
    return str(dtype).removeprefix("torch.")


def short_name(dtype: torch.dtype | str) -> str:
    """The name of a dtype in recipes, or its own name if recipes have none.

    Example: short_name(torch.bfloat16) is "bf16"
    """
    name = dtype_name(dtype)
    return next((short for short, each in SHORT_NAMES.items() if dtype_name(each) == name), name)
