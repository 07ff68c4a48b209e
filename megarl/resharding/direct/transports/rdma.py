"""One-sided reads by NIXL: a bucket is registered memory, which a destination reads once it is announced.

A source posts nothing and waits for nobody: pairs have no communicator, and a destination that dies leaves nothing
behind. All that a destination needs to know about a source is its offer. The exception is sockets: there UCX makes the
source send the data, and a destination that dies in the middle may crash the source's process, too (UCX 1.23).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from torch import Tensor

from megarl.process.gpudirect import GPUDIRECT, gpudirect_obstacle
from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.transports.endpoint import (
    BUCKETS,
    Readable,
    Rendezvous,
    Transport,
    ZeroCopyPiece,
    own_memory,
)
from megarl.resharding.direct.transports.nixl_agent import NixlAgent, Read, RemoteMemory
from megatron_ext import device
from megatron_ext.cuda_memory import OwnMemory

_SMALLEST_BYTES = 1
"""Minimum bucket size: a rank that receives nothing would have empty buckets, which cannot be registered everywhere."""
_TRIAL_BYTES = 4 * 2**20
"""Bytes of the trial read when two ranks connect, which reveals a broken path early. It is large enough to take the
protocol of a whole bucket, since UCX uses another one for few bytes.
"""
_NO_WAY = (
    "no network card reads from there by itself; look at the ports of both machines and the fabric between them"
    " (ibstat, ib_read_bw), at GPUDirect on the other machine (megarl doctor), and at UCX_NET_DEVICES and UCX_TLS,"
    " which may leave sockets alone. UCX_PROTO_EMULATION_ENABLE=y lets software copy, many times slower"
)
"""The remedy if there is no known obstacle to GPUDirect on this machine."""


@dataclass(frozen=True)
class RdmaOffer:
    """Everything a destination needs to read a source's buckets, and the tensors that it may read in place."""

    memory: RemoteMemory
    bucket_bytes: int
    tensors: Mapping[str, Readable]


class RdmaSendEndpoint:
    """The sending endpoint: two buckets that destinations read."""

    def __init__(self, rendezvous: Rendezvous, rank: int, bucket_bytes: int, buckets: Sequence[Tensor] = ()) -> None:
        self._agent = NixlAgent(f"{rendezvous.senders} {rank}", is_read=True, by_hardware=_by_hardware(rendezvous))
        self._own = [] if buckets else _own_buckets(bucket_bytes)
        self.buckets = buckets or [each.tensor for each in self._own]
        self._memory = self._agent.register(self.buckets)
        self._tensors: Mapping[str, Readable] = {}

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """See `SendEndpoint.share`; shares host memory only.

        A GPU packs and unpacks far faster than its network card transfers. Its memory, once registered, could also not
        be freed when an engine sleeps or a trainer is offloaded.
        """
        on_host = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
        if on_host:
            self._memory = replace(self._memory, metadata=self._agent.register(list(on_host.values())).metadata)
            self._tensors = {
                name: Readable(tensor.data_ptr(), tuple(tensor.shape), tensor.dtype) for name, tensor in on_host.items()
            }

    def offer(self, destination: int) -> RdmaOffer:  # noqa: ARG002
        """See `SendEndpoint.offer`."""
        return RdmaOffer(self._memory, len(self.buckets[0]), self._tensors)

    def push(self, bucket: int, size_bytes: int, destination: int) -> None:
        """Do nothing: the destination reads."""

    def all_connected(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Deregister the memory, which peers then cannot read any more, and free the buckets."""
        self._agent.close()
        self.buckets = []
        _close(self._own)


class RdmaRecvEndpoint:
    """The receiving endpoint: reads into its own two buckets in turn."""

    pulls_at_once = BUCKETS

    def __init__(self, rendezvous: Rendezvous, rank: int, bucket_bytes: int, check: Callable[[], None]) -> None:
        self._senders, self._timeout_s, self._check = rendezvous.senders, rendezvous.timeout_s, check
        self._by_hardware = _by_hardware(rendezvous)
        self._agent = NixlAgent(f"engine worker {rank}", is_read=False, by_hardware=self._by_hardware)
        self._own = _own_buckets(bucket_bytes)
        self._buckets = [each.tensor for each in self._own]
        self._agent.register(self._buckets)
        self._offers: dict[int, RdmaOffer] = {}
        self._names: dict[int, str] = {}
        self._first_reads: list[Read] = []
        self._places: Sequence[Tensor] = ()
        self._pulls = count()

    def connect(self, source: int, offer: RdmaOffer) -> None:
        """Accept the offer of a source, and begin a trial read from one of its buckets."""
        self._offers[source] = offer
        self._names[source] = self._agent.add(offer.memory, self._peer(source))
        first = self._buckets[0][: min(offer.bucket_bytes, _TRIAL_BYTES)], offer.memory.addresses[0]
        with self._trial():
            self._first_reads.append(self._begin_reads(source, [first]))

    def all_connected(self) -> None:
        """Wait for the trial reads, which prove that there is a path to every source."""
        for read in self._first_reads:
            with self._trial():
                read.finish(self._timeout_s, self._check)
        self._first_reads = []

    def readable(self, source: int) -> Mapping[str, Readable]:
        """See `RecvEndpoint.readable`."""
        return self._offers[source].tensors

    def take_into(self, places: Sequence[Tensor]) -> None:
        """See `RecvEndpoint.take_into`."""
        if places:
            self._places = places
            self._agent.register(places)

    def pull(
        self, source: int, bucket: int, size_bytes: int, zero_copy: Sequence[ZeroCopyPiece] = ()
    ) -> Callable[[], Tensor]:
        """Begin to read."""
        own = self._buckets[next(self._pulls) % BUCKETS]
        reads = _reads(own[:size_bytes], self._offers[source].memory.addresses[bucket], zero_copy)
        return partial(self._finish, self._begin_reads(source, list(reads)), own)

    def close(self) -> "Sequence[RdmaRecvEndpoint]":
        """Disconnect from the sources and free the buckets, unless a read is still in flight; see `NixlAgent.close`."""
        self._buckets = []
        if not self._agent.close():
            return [self]
        _close(self._own)
        self._places = ()
        return ()

    @contextmanager
    def _trial(self) -> Iterator[None]:
        try:
            yield
        except TransferError as error:
            if not self._by_hardware:
                raise
            # The error may also mean a dead source, which its link reports more clearly.
            self._check()
            here = gpudirect_obstacle()
            reason = f"network cards do not reach the memory of GPUs here: {here}; {GPUDIRECT}" if here else _NO_WAY
            raise TransferError(f"{error}: {reason}, or set refit.transport=tcp") from error

    def _begin_reads(self, source: int, reads: Sequence[tuple[Tensor, int]]) -> Read:
        return self._agent.begin_reads(reads, self._offers[source].memory, self._names[source], self._peer(source))

    def _finish(self, read: Read, bucket: Tensor) -> Tensor:
        read.finish(self._timeout_s, self._check)
        return bucket

    def _peer(self, source: int) -> str:
        return f"{self._senders} {source}"


def _by_hardware(rendezvous: Rendezvous) -> bool:
    return rendezvous.by_hardware and device.backend() == "nccl"


def _own_buckets(bucket_bytes: int) -> list[OwnMemory]:
    return [own_memory(max(bucket_bytes, _SMALLEST_BYTES)) for _ in range(BUCKETS)]


def _close(memories: Sequence[OwnMemory]) -> None:
    for each in memories:
        each.close()


def _reads(own: Tensor, bucket: int, zero_copy: Sequence[ZeroCopyPiece]) -> Iterator[tuple[Tensor, int]]:
    """The reads of a message: zero-copy pieces from their tensors, all between from the bucket at address `bucket`."""
    at = 0
    for each in zero_copy:
        if at < each.start:
            yield own[at : each.start], bucket + at
        into = own[each.start : each.start + each.size_bytes] if each.into is None else each.into
        yield into, each.address
        at = each.stop
    if at < len(own):
        yield own[at:], bucket + at


RDMA = Transport(RdmaSendEndpoint, RdmaRecvEndpoint)
