"""Memory that both ranks map: a destination reads the source's bucket in place, and the transport moves nothing.

It is shared memory on a host, and CUDA IPC on GPUs that can access each other's memory.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.transports.endpoint import (
    BUCKETS,
    OnlyBuckets,
    RecvEndpoint,
    Rendezvous,
    Transport,
    ZeroCopyPiece,
    own_memory,
)
from megarl.resharding.shared_memory import Segment, map_segment
from megatron_ext import device
from megatron_ext.cuda_memory import CudaMemoryError, MappedMemory

_WITHOUT = "if the run is on one machine, refit.transport=rdma or tcp do without"


class CudaSegment:
    """New memory on this process's GPU: `memory` (uint8 [size_bytes]), and a handle for processes that reach the GPU.

    It stays allocated until `close` and as long as receivers map it, and does not depend on their staying alive.
    """

    def __init__(self, size_bytes: int) -> None:
        self._own = own_memory(size_bytes)
        self.memory = self._own.tensor

    def handle(self) -> tuple[str, bytes]:
        """The GPU's UUID and the CUDA IPC handle, for any number of `MappedCudaSegment`.

        Raises TransferError, with CUDA's reason, if memory of this GPU cannot be shared.
        """
        try:
            return device.uuid(), self._own.handle()
        except CudaMemoryError as error:
            raise TransferError(
                f"GPU {device.uuid()} does not share its memory with other processes ({error}), as CUDA IPC does;"
                f" {_WITHOUT}"
            ) from error

    def all_mapped(self) -> None:
        """Do nothing: the handle stays valid until `close`."""

    def close(self) -> None:
        """Free the memory."""
        self._own.close()


class MappedCudaSegment:
    """A mapped CUDA segment: `memory` (uint8 [size_bytes]), a tensor on this process's GPU, wherever its memory is.

    Raises TransferError, with CUDA's reason, if this GPU cannot access the other's memory.
    """

    def __init__(self, handle: tuple[str, bytes], size_bytes: int) -> None:
        uuid, there = handle
        if not device.reaches(uuid):
            raise _unreachable(uuid, "they are no peers")
        # GPU indices differ between processes, and the other GPU may not be visible here, hence the UUID. CUDA maps
        # memory of any GPU of the host, visible or not, into the address space of this one.
        try:
            self._mapped = MappedMemory(there, size_bytes)
        except CudaMemoryError as error:
            raise _unreachable(uuid, str(error)) from error
        self.memory = self._mapped.tensor

    def close(self) -> None:
        """Unmap the memory."""
        self._mapped.close()


class MappedSegment:
    """A mapped segment of host memory: `memory` (uint8 [size_bytes])."""

    def __init__(self, handle: str, size_bytes: int) -> None:
        self.memory = map_segment(handle, size_bytes)

    def close(self) -> None:
        """Do nothing: the memory is unmapped with the last view of it."""


_Own: TypeAlias = Segment | CudaSegment
_Mapped: TypeAlias = MappedSegment | MappedCudaSegment


def _unreachable(uuid: str, reason: str) -> TransferError:
    return TransferError(
        f"GPU {device.uuid()} does not map the memory of GPU {uuid} ({reason}): CUDA IPC needs NVLink or PCIe peer "
        f"access, and containers of one machine that share a PID namespace; {_WITHOUT}"
    )


class MappedSendEndpoint(OnlyBuckets):
    """The sending endpoint; its buckets are the `segments`."""

    def __init__(self, segments: Sequence[_Own]) -> None:
        self._segments = segments
        self.buckets: Sequence[Tensor] = [segment.memory for segment in segments]

    def offer(self, destination: int) -> Any:  # noqa: ARG002
        """The size and handles of the segments."""
        return len(self.buckets[0]), [segment.handle() for segment in self._segments]

    def push(self, bucket: int, size_bytes: int, destination: int) -> None:
        """Do nothing: the destination reads the bucket where it is."""

    def all_connected(self) -> None:
        """See `SendEndpoint.all_connected`."""
        for segment in self._segments:
            segment.all_mapped()

    def close(self) -> None:
        """See `SendEndpoint.close`."""
        self.buckets = []
        for segment in self._segments:
            segment.close()
        self._segments = []


class MappedRecvEndpoint(OnlyBuckets):
    """The receiving endpoint, which maps the segments of all sources."""

    pulls_at_once = 2**30

    def __init__(self, map_memory: Callable[[Any, int], _Mapped]) -> None:
        self._map = map_memory
        self._segments: dict[int, list[_Mapped]] = {}

    def connect(self, source: int, offer: Any) -> None:
        """Map the source's segments."""
        bucket_bytes, handles = offer
        mapped = self._segments.setdefault(source, [])
        for handle in handles:
            mapped.append(self._map(handle, bucket_bytes))

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
        return lambda: self._segments[source][bucket].memory

    def close(self) -> Sequence[RecvEndpoint]:
        """Unmap the segments."""
        for mapped in self._segments.values():
            for segment in mapped:
                segment.close()
        self._segments = {}
        return ()


def _mapped(create: Callable[[int], _Own], map_memory: Callable[[Any, int], _Mapped]) -> Transport:
    def send_endpoint(_rendezvous: Rendezvous, _rank: int, bucket_bytes: int) -> MappedSendEndpoint:
        # A rank that sends nothing has buckets of 0 bytes, which cannot be allocated.
        return MappedSendEndpoint([create(max(bucket_bytes, 1)) for _ in range(BUCKETS)])

    def recv_endpoint(
        _rendezvous: Rendezvous, _rank: int, _bucket_bytes: int, _check: Callable[[], None]
    ) -> MappedRecvEndpoint:
        return MappedRecvEndpoint(map_memory)

    return Transport(send_endpoint, recv_endpoint)


SHARED_MEMORY = _mapped(Segment, MappedSegment)
CUDA_IPC = _mapped(CudaSegment, MappedCudaSegment)
