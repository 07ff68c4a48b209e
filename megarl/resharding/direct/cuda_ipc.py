"""Segments of GPU memory that other processes map (CUDA IPC)."""

import inspect
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megarl.resharding.direct.connections import TransferError
from megatron_ext import device

Handle: TypeAlias = tuple[str, tuple[Any, ...]]
"""The UUID of the GPU that has the memory, and the arguments with which torch maps it."""

_INDEX_OF_DEVICE = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")


class Segment:
    """New memory on this process's GPU: `memory` (uint8 [size_bytes]), and handles for processes that reach the GPU."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device.device())

    def handle(self) -> Handle:
        """Handle for one call of `map_segment`: torch counts who has mapped the memory."""
        _, arguments = reduce_tensor(self.memory)
        return device.uuid(), arguments

    def close(self) -> None:
        """Nothing to do: a handle that was given to nobody leads nowhere."""


def map_segment(handle: Handle, size_bytes: int) -> Tensor:
    """Map the segment of `handle`: a uint8 tensor [size_bytes], for torch on this process's GPU, wherever it lies.

    Raises TransferError where this GPU does not reach the memory of the other.
    """
    uuid, arguments = handle
    own = device.device().index
    unreachable = (
        f"GPU {device.uuid()} does not reach the memory of GPU {uuid} (CUDA IPC needs NVLink or PCIe peer access): set "
        "refit.transport=point_to_point"
    )
    if not device.reaches(uuid):
        raise TransferError(unreachable)
    # The maker's index names another GPU here, or none: each process numbers the GPUs that it sees. CUDA maps memory of
    # any GPU of the host, seen or not, into the address space of the one that is asked.
    ours = (*arguments[:_INDEX_OF_DEVICE], own, *arguments[_INDEX_OF_DEVICE + 1 :])
    try:
        return rebuild_cuda_tensor(*ours)[:size_bytes]
    except RuntimeError as error:  # all that CUDA raises
        raise TransferError(f"{unreachable} ({error})") from error
