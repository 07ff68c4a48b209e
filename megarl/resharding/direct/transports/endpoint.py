"""Protocol of a transport: two ends, between which the bytes of a bucket get from a source rank to a destination rank.

Messages over a `Link` say which bytes were put where; a transport only moves bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from megarl.resharding.direct.connections import Address

BUCKETS = 2
"""Buckets of each rank: one is filled or emptied while the other one moves."""


@dataclass(frozen=True)
class Rendezvous:
    """Addresses by which the ranks of a transfer find each other; the same for all of them.

    `listeners` are those of the ranks that send, and `senders` is how errors call one; `relay_listeners` are those of
    the destination ranks, where they pass something on. `store` is the address of torch's key-value store, where one is
    needed. `timeout_s` is how long a rank waits for any sign of another.

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


Pull: TypeAlias = Callable[[], Tensor]
"""Waits for the bytes that are on their way, and gives the bucket that they are in (uint8)."""


class SendEndpoint(Protocol):
    """The end of a source rank, which has `BUCKETS` buckets (uint8, one dimension)."""

    buckets: Sequence[Tensor]

    def offer(self) -> Any:
        """Information for one receiving end, of a type that pickles."""

    def push(self, bucket: int, size_bytes: int, destination: int) -> None:
        """Begin to move the first bytes of a bucket, which stays as it is until the destination acknowledged it."""

    def all_connected(self) -> None:
        """All receivers have taken up the offer."""

    def close(self) -> None:
        """Free the buckets."""


class RecvEndpoint(Protocol):
    """The end of a destination rank; it has at most `pulls_at_once` pulls in flight and ends them in their order."""

    pulls_at_once: int

    def connect(self, source: int, offer: Any) -> None:
        """Take up the offer of a source."""

    def pull(self, source: int, bucket: int, size_bytes: int) -> Pull:
        """Begin to fetch what a source has pushed."""

    def close(self) -> None:
        """Free what belongs to the transfer."""


@dataclass(frozen=True)
class Transport:
    """Makers of both ends: (rendezvous, rank, bytes of a bucket)."""

    sending: Callable[[Rendezvous, int, int], SendEndpoint]
    receiving: Callable[[Rendezvous, int, int], RecvEndpoint]
    needs_store: bool = False
