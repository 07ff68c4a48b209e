"""Memory that both ranks have mapped: a destination reads the source's bucket where it is, and nothing is moved.

On one host, that is shared memory; on GPUs which reach each other's memory, CUDA IPC.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from megarl.resharding import shared_memory
from megarl.resharding.direct import cuda_ipc
from megarl.resharding.direct.transports.endpoint import BUCKETS, Pull, Rendezvous, Transport


class Segment(Protocol):
    """`memory` of this process (uint8, one dimension)."""

    memory: Tensor

    def handle(self) -> Any:
        """Gives the memory to one other process; of a type that pickles."""

    def close(self) -> None:
        """Let nobody else map it; the memory stays until the last mapping is gone."""


@dataclass(frozen=True)
class Segments:
    """A kind of memory: how it is made, and how it is mapped by its handle."""

    create: Callable[[int], Segment]
    map: Callable[[Any, int], Tensor]


class MappedSendEndpoint:
    """Two segments."""

    def __init__(self, segments: Segments, rendezvous: Rendezvous, rank: int, bucket_bytes: int) -> None:  # noqa: ARG002
        self._segments = [segments.create(bucket_bytes) for _ in range(BUCKETS)]
        self.buckets: Sequence[Tensor] = [segment.memory for segment in self._segments]

    def offer(self) -> Any:
        """The segments' size and handles."""
        return len(self.buckets[0]), [segment.handle() for segment in self._segments]

    def push(self, bucket: int, size_bytes: int, destination: int) -> None:
        """Nothing has to be moved."""

    def all_connected(self) -> None:
        """See `SendEndpoint.all_connected`."""
        for segment in self._segments:
            segment.close()
        self._segments = []

    def close(self) -> None:
        """See `SendEndpoint.close`."""
        self.all_connected()
        self.buckets = []


class MappedRecvEndpoint:
    """The segments of all sources."""

    pulls_at_once = 2**30

    def __init__(self, segments: Segments, rendezvous: Rendezvous, rank: int, bucket_bytes: int) -> None:  # noqa: ARG002
        self._map = segments.map
        self._buckets: dict[int, list[Tensor]] = {}

    def connect(self, source: int, offer: Any) -> None:
        """Map the source's segments."""
        bucket_bytes, handles = offer
        self._buckets[source] = [self._map(handle, bucket_bytes) for handle in handles]

    def pull(self, source: int, bucket: int, size_bytes: int) -> Pull:  # noqa: ARG002
        """See `RecvEndpoint.pull`."""
        return lambda: self._buckets[source][bucket]

    def close(self) -> None:
        """Unmap the segments."""
        self._buckets = {}


def _mapped(segments: Segments) -> Transport:
    return Transport(partial(MappedSendEndpoint, segments), partial(MappedRecvEndpoint, segments))


SHARED_MEMORY = _mapped(Segments(shared_memory.Segment, shared_memory.map_segment))
CUDA_IPC = _mapped(Segments(cuda_ipc.Segment, cuda_ipc.map_segment))
