"""Names of the types of tensors."""

import torch


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of a type as config.json and people have it.

    Example: dtype_name(torch.bfloat16) is "bfloat16"
    """
    return str(dtype).removeprefix("torch.")
