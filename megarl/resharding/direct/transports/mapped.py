"""Memory that both ranks have mapped: a destination reads the source's bucket where it is, and nothing is moved.

On one host, that is shared memory; on GPUs which reach each other's memory, CUDA IPC.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.transports.endpoint import BUCKETS, OnlyBuckets, Rendezvous, Transport, ZeroCopyPiece
from megarl.resharding.shared_memory import Segment, map_segment
from megatron_ext import device

_INDEX_OF_DEVICE = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")


class CudaSegment:
    """New memory on this process's GPU: `memory` (uint8 [size_bytes]), and handles for processes that reach the GPU."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device.device())

    def handle(self) -> Any:
        """The GPU's UUID and torch's arguments, for one `map_cuda_segment`: torch counts who has mapped the memory."""
        _, arguments = reduce_tensor(self.memory)
        return device.uuid(), arguments

    def close(self) -> None:
        """Do nothing: a handle that was given to nobody leads nowhere."""


def map_cuda_segment(handle: Any, size_bytes: int) -> Tensor:
    """Map the segment of `handle`: a uint8 tensor [size_bytes], for torch on this process's GPU, wherever it lies.

    Raises TransferError where this GPU does not reach the memory of the other.
    """
    uuid, arguments = handle
    own = device.device().index
    unreachable = (
        f"GPU {device.uuid()} does not reach the memory of GPU {uuid} (CUDA IPC needs NVLink or PCIe peer access): if "
        "the run is on one machine, set refit.transport to rdma or tcp"
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


class MappedSendEndpoint(OnlyBuckets):
    """The buckets lie in `segments`."""

    def __init__(self, segments: Sequence[Segment | CudaSegment]) -> None:
        self._segments = segments
        self.buckets: Sequence[Tensor] = [segment.memory for segment in segments]

    def offer(self, destination: int) -> Any:  # noqa: ARG002
        """The segments' size and handles."""
        return len(self.buckets[0]), [segment.handle() for segment in self._segments]

    def push(self, bucket: int, size_bytes: int, destination: int) -> None:
        """Do nothing: the destination reads the bucket where it is."""

    def all_connected(self) -> None:
        """See `SendEndpoint.all_connected`."""
        for segment in self._segments:
            segment.close()
        self._segments = []

    def close(self) -> None:
        """See `SendEndpoint.close`."""
        self.all_connected()
        self.buckets = []


class MappedRecvEndpoint(OnlyBuckets):
    """The segments of all sources."""

    pulls_at_once = 2**30

    def __init__(self, map_memory: Callable[[Any, int], Tensor]) -> None:
        self._map = map_memory
        self._buckets: dict[int, list[Tensor]] = {}

    def connect(self, source: int, offer: Any) -> None:
        """Map the source's segments."""
        bucket_bytes, handles = offer
        self._buckets[source] = [self._map(handle, bucket_bytes) for handle in handles]

    def all_connected(self) -> None:
        """Do nothing."""

    def pull(
        self,
        source: int,
        bucket: int,
        size_bytes: int,  # noqa: ARG002
        zero_copy: Sequence[ZeroCopyPiece] = (),  # noqa: ARG002
    ) -> Callable[[], Tensor]:
        """See `RecvEndpoint.pull`."""
        return lambda: self._buckets[source][bucket]

    def close(self) -> None:
        """Unmap the segments."""
        self._buckets = {}


def _mapped(create: Callable[[int], Segment | CudaSegment], map_memory: Callable[[Any, int], Tensor]) -> Transport:
    def send_endpoint(_rendezvous: Rendezvous, _rank: int, bucket_bytes: int) -> MappedSendEndpoint:
        # There is no memory of no bytes, which a rank has that sends nothing.
        return MappedSendEndpoint([create(max(bucket_bytes, 1)) for _ in range(BUCKETS)])

    def recv_endpoint(
        _rendezvous: Rendezvous, _rank: int, _bucket_bytes: int, _check: Callable[[], None]
    ) -> MappedRecvEndpoint:
        return MappedRecvEndpoint(map_memory)

    return Transport(send_endpoint, recv_endpoint)


SHARED_MEMORY = _mapped(Segment, map_segment)
CUDA_IPC = _mapped(CudaSegment, map_cuda_segment)
