"""Memory for values of all tokens."""

import numpy as np
import torch
from torch import Tensor

_NUMPY_TYPES = {torch.float32: np.float32, torch.float64: np.float64}


def empty(count: int, like: Tensor) -> Tensor:
    """Uninitialised [count], of the type and device of `like`.

    On a CPU it comes from numpy, which asks for huge pages: touching 100 MB in small ones for the first time takes
    longer than an addition in them, several times over.
    """
    if like.device.type == "cpu" and like.dtype in _NUMPY_TYPES:
        return torch.from_numpy(np.empty(count, _NUMPY_TYPES[like.dtype]))
    return like.new_empty(count)
