"""Interfaces of a transport: a pair of endpoints that move a bucket's bytes from a source rank to a destination rank.

A transport only moves bytes; messages over a `Link` say which bytes are where.
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
"""Buckets of each rank: one is filled or emptied while the other is in transfer."""


@dataclass(frozen=True)
class Rendezvous:
    """Addresses by which the ranks of a transfer find each other; the same for all of them.

    `listeners` are the addresses of the sending ranks, and `senders` is what error messages call one; `relay_listeners`
    are the addresses of destination ranks that relay. `store` is the address of torch's key-value store, if the
    transport needs one. `timeout_s` is how long a rank waits for a sign of life from another. With a `topology`,
    `transport` applies between its nodes, and ranks of one node use memory that both map.

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
    """Whether all messages, including relayed ones, carry a checksum."""
    with_changes: bool = False
    """Whether sources may send messages as changes; requires checksums."""
    by_hardware: bool = False
    """Whether all ranks have RDMA ports: network cards must then read GPU memory themselves, and UCX's slow copies in
    software are an error.
    """

    def __post_init__(self) -> None:
        if self.with_changes and not self.with_checksum:
            raise ValueError("changes lead to the right bytes where both ends hold the same: they need checksums")


@dataclass(frozen=True)
class Readable:
    """A contiguous tensor that another process may read in place.

    Example: `Readable(140245101125632, (4096, 2048), torch.bfloat16)`.
    """

    address: int
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class ZeroCopyPiece:
    """A piece that skips the buckets: its range in the message, its address at the source, and its target tensor.

    If `into` is None, it is read into the bucket after all, at its range in the message.
    """

    start: int
    stop: int
    """End of the range, with the padding that aligns the next piece."""
    address: int
    size_bytes: int
    into: Tensor | None = None
    into_address: int = 0
    """Address of `into` when its memory was registered; after a sleep it may be elsewhere."""


class SendEndpoint(Protocol):
    """The endpoint of a source rank, with `BUCKETS` buckets (uint8 [size])."""

    buckets: Sequence[Tensor]

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """Let destinations read these contiguous tensors in place, if the transport can. Called before any `offer`."""

    def offer(self, destination: int) -> Any:
        """Return what the endpoint of one destination needs to connect; it can be pickled."""

    def push(self, bucket: int, size_bytes: int, destination: int) -> None:
        """Begin to move the first bytes of a bucket, which must not change until the destination acknowledges it."""

    def all_connected(self) -> None:
        """Called when all receivers have accepted their offers."""

    def close(self) -> None:
        """Free the buckets."""


class RecvEndpoint(Protocol):
    """The endpoint of a destination rank. At most `pulls_at_once` pulls are in flight, and they complete in order."""

    pulls_at_once: int

    def connect(self, source: int, offer: Any) -> None:
        """Accept the offer of a source, or begin to."""

    def all_connected(self) -> None:
        """Return when all offers are accepted. Raises TransferError if one cannot be."""

    def readable(self, source: int) -> Mapping[str, Readable]:
        """The tensors of a source, by name, that can be read in place. Called after `connect`."""

    def take_into(self, places: Sequence[Tensor]) -> None:
        """Prepare these tensors as targets of zero-copy reads."""

    def pull(
        self, source: int, bucket: int, size_bytes: int, zero_copy: Sequence[ZeroCopyPiece] = ()
    ) -> Callable[[], Tensor]:
        """Begin to fetch what a source has pushed; calling the result waits and gives the bucket it is in (uint8).

        The `zero_copy` pieces, in message order, are read in place at the source.
        """

    def close(self) -> "Sequence[RecvEndpoint]":
        """Free the endpoint's memory. Returns the endpoints that must be closed again later, normally none.

        A returned endpoint still has reads in flight into its memory, which must stay until then.
        """


class OnlyBuckets:
    """Mixin for endpoints without zero copy."""

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing."""

    def readable(self, source: int) -> Mapping[str, Readable]:  # noqa: ARG002
        """No tensors can be read in place."""
        return {}

    def take_into(self, places: Sequence[Tensor]) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Transport:
    """Factories of both endpoints, called with (rendezvous, rank, bucket size in bytes).

    The sending endpoint of a transport between machines may also be given existing buckets. The receiving endpoint is
    also given a function that it calls regularly while it waits; an error that it raises ends the wait.
    """

    send_endpoint: Callable[..., SendEndpoint]
    recv_endpoint: Callable[[Rendezvous, int, int, Callable[[], None]], RecvEndpoint]
    abort_rendezvous: Callable[[Rendezvous, str], None] = lambda _rendezvous, _reason: None
    """Makes ranks that wait for each other in the transport itself, not over links, fail with a reason."""
    needs_store: bool = False


def new_buckets(size_bytes: int) -> list[Tensor]:
    """The buckets of a rank (uint8 [size_bytes]), on its device."""
    return [torch.zeros(size_bytes, dtype=torch.uint8, device=device.device()) for _ in range(BUCKETS)]


def own_memory(size_bytes: int) -> OwnMemory:
    """Allocate memory that other processes map or network cards read. Raises TransferError if there is not enough."""
    try:
        return OwnMemory(size_bytes)
    except CudaMemoryError as error:
        raise TransferError(
            f"GPU {device.uuid()} has no memory for a bucket of {size_bytes:,} bytes ({error}): if it is full, lower "
            "refit.bucket_bytes, or the share of the GPU that its engine takes"
        ) from error
