"""A transport: two endpoints, between which the bytes of a bucket get from a source rank to a destination rank.

Messages over a `Link` say which bytes were put where; a transport only moves bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from converters.layout import Shape
from converters.topology import Topology
from megarl.resharding.direct.connections import Address, TransferError
from megatron_ext import device
from megatron_ext.cuda_memory import CudaMemoryError, OwnMemory

BUCKETS = 2
"""Buckets of each rank: one is filled or emptied while the other one moves."""


@dataclass(frozen=True)
class Rendezvous:
    """Addresses by which the ranks of a transfer find each other; the same for all of them.

    `listeners` are the addresses of the sending ranks, and `senders` is how errors call one; `relay_listeners` are the
    addresses of destination ranks that relay. `store` is the address of torch's key-value store, where one is
    needed. `timeout_s` is how long a rank waits for any sign of another. With a `topology`, `transport` is that between
    its nodes, and ranks of one node go through memory that both map.

    Example: two trainer ranks and four workers on one host: `Rendezvous("shared_memory", key, [("10.0.0.1", 40001),
    ("10.0.0.1", 40002)], store=None, destinations=4, timeout_s=600.0)`.
    """

    transport: str
    key: bytes = field(repr=False)
    listeners: Sequence[Address]
    store: Address | None
    destinations: int
    timeout_s: float
    relay_listeners: Sequence[Address] = ()
    senders: str = "trainer rank"
    topology: Topology | None = None
    with_checksum: bool = True
    """Whether all messages, relayed ones too, come with one."""
    with_changes: bool = False
    """Whether messages of the sending ranks may come as changes; only with checksums."""
    by_hardware: bool = False
    """Whether all ranks have ports for rdma, which are to read memory of GPUs by themselves, or not at all."""

    def __post_init__(self) -> None:
        if self.with_changes and not self.with_checksum:
            raise ValueError("changes lead to the right bytes where both ends hold the same: they need checksums")


@dataclass(frozen=True)
class Readable:
    """A contiguous tensor that another process may read where it is.

    Example: `Readable(140245101125632, (4096, 2048), torch.bfloat16)`.
    """

    address: int
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class ZeroCopyPiece:
    """A piece that skips the buckets: its place in a message, its address at the source, and its own tensor.

    Without `into` it is read into the bucket after all, at its place in the message.
    """

    start: int
    stop: int
    """The aligned end."""
    address: int
    size_bytes: int
    into: Tensor | None = None
    into_address: int = 0
    """Where that tensor lay when its memory was registered: after a sleep it may lie elsewhere."""


class SendEndpoint(Protocol):
    """The endpoint of a source rank, which has `BUCKETS` buckets (uint8, one dimension)."""

    buckets: Sequence[Tensor]

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """Let destinations read these contiguous tensors where they are, if the transport can; before any `offer`."""

    def offer(self, destination: int) -> Any:
        """Information for the endpoint of one destination; it can be pickled."""

    def push(self, bucket: int, size_bytes: int, destination: int) -> None:
        """Begin to move the first bytes of a bucket, which stays as it is until the destination acknowledged it."""

    def all_connected(self) -> None:
        """Take note that all receivers have taken up the offer."""

    def close(self) -> None:
        """Free the buckets."""


class RecvEndpoint(Protocol):
    """The endpoint of a destination rank; at most `pulls_at_once` pulls are in flight, and end in their order."""

    pulls_at_once: int

    def connect(self, source: int, offer: Any) -> None:
        """Take up the offer of a source, or begin to."""

    def all_connected(self) -> None:
        """Return when all offers are taken up. Raises TransferError if one cannot be."""

    def readable(self, source: int) -> Mapping[str, Readable]:
        """The tensors of a source, by name, that can be read where they are; after `connect`."""

    def take_into(self, places: Sequence[Tensor]) -> None:
        """Let what is read go into these, too."""

    def pull(
        self, source: int, bucket: int, size_bytes: int, zero_copy: Sequence[ZeroCopyPiece] = ()
    ) -> Callable[[], Tensor]:
        """Begin to fetch what a source has pushed; calling the result waits and gives the bucket it is in (uint8).

        The `zero_copy` pieces, in the order of the message, are read where they are.
        """

    def close(self) -> "Sequence[RecvEndpoint]":
        """Free what belongs to the transfer, and return nothing; or the endpoints that are to be closed again later.

        Something may still be read into their memory, which has to stay until then.
        """


class OnlyBuckets:
    """The part of an endpoint that reads nothing but buckets."""

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing."""

    def readable(self, source: int) -> Mapping[str, Readable]:  # noqa: ARG002
        """Nothing can be read."""
        return {}

    def take_into(self, places: Sequence[Tensor]) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Transport:
    """Makers of both ends: (rendezvous, rank, bytes of a bucket).

    A sending end that goes between machines also gets its buckets, where there are some. A receiving end also gets what
    it calls now and then while it waits, which raises what is to end that.
    """

    send_endpoint: Callable[..., SendEndpoint]
    recv_endpoint: Callable[[Rendezvous, int, int, Callable[[], None]], RecvEndpoint]
    abort_rendezvous: Callable[[Rendezvous, str], None] = lambda _rendezvous, _reason: None
    """Lets ranks that meet by the transport itself, and not over links, give up for a reason."""
    needs_store: bool = False


def new_buckets(size_bytes: int) -> list[Tensor]:
    """The buckets of a rank (uint8 [size_bytes]), on its device."""
    return [torch.zeros(size_bytes, dtype=torch.uint8, device=device.device()) for _ in range(BUCKETS)]


def own_memory(size_bytes: int) -> OwnMemory:
    """Memory for a bucket that others map, or read by a network card. Raises TransferError if there is none."""
    try:
        return OwnMemory(size_bytes)
    except CudaMemoryError as error:
        raise TransferError(
            f"GPU {device.uuid()} has no memory for a bucket of {size_bytes:,} bytes ({error}): if it is full, lower "
            "refit.bucket_bytes, or the share of the GPU that its engine takes"
        ) from error
