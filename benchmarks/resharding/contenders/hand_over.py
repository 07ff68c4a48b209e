"""Two ways for the first rank of a pipeline stage to send whole tensors to all workers of the engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.resharding.direct.transports.endpoint import BUCKETS
from megarl.resharding.shared_memory import Segment, map_segment
from resharding.party import Party
from resharding.processes import hear, say

Bucket: TypeAlias = tuple[int, int]
"""The first rank of a stage, and the index of one of its buckets, which share its memory in turn."""


class HandOver(Protocol):
    """Memory for `BUCKETS` buckets of each stage, at both ends, and the transfer between them."""

    @property
    def memory(self) -> Mapping[int, Sequence[Tensor]]:
        """First rank of a stage -> its buckets (uint8); on the trainer only those of this rank."""

    def give(self, bucket: Bucket, size_bytes: int) -> None:
        """Trainer: start sending a bucket to all workers."""

    def wait_until_taken(self, bucket: Bucket) -> None:
        """Trainer: wait until all workers are done with it."""

    def expect(self, bucket: Bucket, size_bytes: int) -> None:
        """Worker: start receiving it."""

    def take(self, bucket: Bucket) -> None:
        """Worker: wait until it has arrived."""

    def release(self, bucket: Bucket) -> None:
        """Worker: signal that it is no longer needed."""


Makes: TypeAlias = Callable[[Party, Mapping[int, int]], HandOver]
"""Makes one from the first rank of each stage and the bytes of its buckets; called by all ranks together."""


class Broadcast:
    """A gloo broadcast from one rank to all workers."""

    def __init__(self, party: Party, bucket_bytes: Mapping[int, int]) -> None:
        self._groups = {first: dist.new_group([first, *party.workers]) for first in bucket_bytes}
        self.memory: Mapping[int, Sequence[Tensor]] = {
            first: [torch.zeros(size, dtype=torch.uint8) for _ in range(BUCKETS)]
            for first, size in bucket_bytes.items()
            if not party.is_source or first == party.place.rank
        }
        self._under_way: dict[Bucket, Any] = {}

    def give(self, bucket: Bucket, size_bytes: int) -> None:
        """See `HandOver`."""
        first, number = bucket
        memory = self.memory[first][number % BUCKETS][:size_bytes]
        self._under_way[bucket] = dist.broadcast(memory, first, group=self._groups[first], async_op=True)

    def wait_until_taken(self, bucket: Bucket) -> None:
        """See `HandOver`."""
        self._under_way.pop(bucket).wait()

    expect = give
    take = wait_until_taken

    def release(self, bucket: Bucket) -> None:
        """See `HandOver`."""


class InSharedMemory:
    """The workers map the memory in which tensors are assembled, as with CUDA IPC on one GPU."""

    def __init__(self, party: Party, bucket_bytes: Mapping[int, int]) -> None:
        self._party = party
        own = bucket_bytes.get(party.place.rank)
        segments = [Segment(own) for _ in range(BUCKETS)] if own else []
        handles = party.exchange([segment.handle() for segment in segments])
        self.memory: Mapping[int, Sequence[Tensor]] = {
            first: [map_segment(handle, size) for handle in handles[first]]
            for first, size in bucket_bytes.items()
            if not party.is_source or first == party.place.rank
        }
        party.exchange(None)
        for segment in segments:
            segment.close()

    def give(self, bucket: Bucket, size_bytes: int) -> None:  # noqa: ARG002
        """See `HandOver`."""
        for worker in self._party.workers:
            say(self._party.place.pipes[worker])

    def wait_until_taken(self, bucket: Bucket) -> None:  # noqa: ARG002
        """See `HandOver`."""
        for worker in self._party.workers:
            hear(self._party.place.pipes[worker])

    def expect(self, bucket: Bucket, size_bytes: int) -> None:
        """See `HandOver`."""

    def take(self, bucket: Bucket) -> None:
        """See `HandOver`."""
        hear(self._party.place.pipes[bucket[0]])

    def release(self, bucket: Bucket) -> None:
        """See `HandOver`."""
        say(self._party.place.pipes[bucket[0]])
