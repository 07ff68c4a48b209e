"""One-sided reads, by NIXL: a bucket is registered memory, which a destination reads when it is announced.

A source posts nothing and waits for nobody: no communicator belongs to a pair, and a destination that dies leaves
nothing behind. One that comes anew needs the source's offer and no more.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from torch import Tensor

from megarl.resharding.direct.transports.endpoint import BUCKETS, Rendezvous, Transport, new_buckets
from megarl.resharding.direct.transports.nixl_agent import NixlAgent, Read, RemoteMemory

# They are read when two ranks meet, so that an error on the way between them shows then. No bucket has less: a rank
# that nothing comes to has buckets without any bytes, which are not registered everywhere.
_FIRST_BYTES = 1


class RdmaSendEndpoint:
    """Two buckets that destinations read."""

    def __init__(self, rendezvous: Rendezvous, rank: int, bucket_bytes: int) -> None:
        self._agent = NixlAgent(f"{rendezvous.senders} {rank}", is_read=True)
        self.buckets: Sequence[Tensor] = new_buckets(max(bucket_bytes, _FIRST_BYTES))
        self._memory = self._agent.register(self.buckets)

    def offer(self) -> RemoteMemory:
        """The buckets, as a destination has to know them."""
        return self._memory

    def push(self, bucket: int, size_bytes: int, destination: int) -> None:
        """Do nothing: the destination reads."""

    def all_connected(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Let nobody read any more, and free the buckets."""
        self._agent.close()
        self.buckets = []


class RdmaRecvEndpoint:
    """Two buckets of its own, into which reads go in turn."""

    pulls_at_once = BUCKETS

    def __init__(self, rendezvous: Rendezvous, rank: int, bucket_bytes: int) -> None:
        self._senders, self._timeout_s = rendezvous.senders, rendezvous.timeout_s
        self._agent = NixlAgent(f"engine worker {rank}", is_read=False)
        self._buckets = new_buckets(max(bucket_bytes, _FIRST_BYTES))
        self._agent.register(self._buckets)
        self._memory: dict[int, RemoteMemory] = {}
        self._names: dict[int, str] = {}
        self._first_reads: list[Read] = []
        self._pulls = count()

    def connect(self, source: int, offer: RemoteMemory) -> None:
        """Get to know the source's buckets, and begin to read from one."""
        self._memory[source] = offer
        self._names[source] = self._agent.add(offer, self._peer(source))
        self._first_reads.append(self._begin_read(source, 0, self._buckets[0][:_FIRST_BYTES]))

    def all_connected(self) -> None:
        """Wait until something was read from each source: then there is a way to all of them."""
        for read in self._first_reads:
            read.finish(self._timeout_s)
        self._first_reads = []

    def pull(self, source: int, bucket: int, size_bytes: int) -> Callable[[], Tensor]:
        """Begin to read."""
        own = self._buckets[next(self._pulls) % BUCKETS]
        return partial(self._finish, self._begin_read(source, bucket, own[:size_bytes]), own)

    def close(self) -> None:
        """End what is being read, leave the sources and free the buckets."""
        self._agent.close()
        self._buckets = []

    def _begin_read(self, source: int, bucket: int, into: Tensor) -> Read:
        return self._agent.begin_read(into, self._memory[source], bucket, self._names[source], self._peer(source))

    def _finish(self, read: Read, bucket: Tensor) -> Tensor:
        read.finish(self._timeout_s)
        return bucket

    def _peer(self, source: int) -> str:
        return f"{self._senders} {source}"


RDMA = Transport(RdmaSendEndpoint, RdmaRecvEndpoint)
