"""Segments of GPU memory that other processes map (CUDA IPC)."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from megatron_ext import device


class Segment:
    """New memory on this process's GPU: `memory` (uint8 [size_bytes]), and handles for processes that reach the GPU."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device.device())

    def handle(self) -> Any:
        """What `map_segment` takes, once: torch counts who has mapped the memory."""
        return reduce_tensor(self.memory)

    def close(self) -> None:
        """Nothing to do: a handle that was given to nobody leads nowhere."""


def map_segment(handle: Any, size_bytes: int) -> Tensor:
    """Map the segment of `handle`: a uint8 tensor [size_bytes] in the GPU memory of its maker."""
    rebuild, arguments = handle
    return rebuild(*arguments)[:size_bytes]
