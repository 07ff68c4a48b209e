"""Chooses a transport per pair of ranks: mapped memory on one node, another transport between nodes.

A rank uses the same two buckets for all its peers. A source's buckets are mapped memory, which serves the other
transport as well as any memory. A destination needs no bucket for what it reads from mapped memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megarl.resharding.direct.transports.endpoint import (
    Readable,
    RecvEndpoint,
    Rendezvous,
    SendEndpoint,
    Transport,
    ZeroCopyPiece,
)


class PerPairSendEndpoint:
    """Sends from the buckets of `within` by either transport; `is_within` says which one reaches a destination."""

    def __init__(self, within: SendEndpoint, between: SendEndpoint, is_within: Callable[[int], bool]) -> None:
        self._within, self._between, self._is_within = within, between, is_within
        self.buckets = within.buckets

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """See `SendEndpoint.share`."""
        self._within.share(tensors)
        self._between.share(tensors)

    def offer(self, destination: int) -> Any:
        """See `SendEndpoint.offer`."""
        return self._way(destination).offer(destination)

    def push(self, bucket: int, size_bytes: int, destination: int) -> None:
        """See `SendEndpoint.push`."""
        self._way(destination).push(bucket, size_bytes, destination)

    def all_connected(self) -> None:
        """See `SendEndpoint.all_connected`."""
        self._within.all_connected()
        self._between.all_connected()

    def close(self) -> None:
        """Close both endpoints and free the buckets."""
        self.buckets = []
        self._between.close()
        self._within.close()

    def _way(self, destination: int) -> SendEndpoint:
        return self._within if self._is_within(destination) else self._between


class PerPairRecvEndpoint:
    """Receives by either transport; `is_within` says which one reaches a source."""

    def __init__(self, within: RecvEndpoint, between: RecvEndpoint, is_within: Callable[[int], bool]) -> None:
        self._within, self._between, self._is_within = within, between, is_within
        self.pulls_at_once = min(within.pulls_at_once, between.pulls_at_once)

    def connect(self, source: int, offer: Any) -> None:
        """See `RecvEndpoint.connect`."""
        self._way(source).connect(source, offer)

    def all_connected(self) -> None:
        """See `RecvEndpoint.all_connected`."""
        self._within.all_connected()
        self._between.all_connected()

    def readable(self, source: int) -> Mapping[str, Readable]:
        """See `RecvEndpoint.readable`."""
        return self._way(source).readable(source)

    def take_into(self, places: Sequence[Tensor]) -> None:
        """See `RecvEndpoint.take_into`."""
        self._within.take_into(places)
        self._between.take_into(places)

    def pull(
        self, source: int, bucket: int, size_bytes: int, zero_copy: Sequence[ZeroCopyPiece] = ()
    ) -> Callable[[], Tensor]:
        """See `RecvEndpoint.pull`."""
        return self._way(source).pull(source, bucket, size_bytes, zero_copy)

    def close(self) -> Sequence[RecvEndpoint]:
        """Close both endpoints. See `RecvEndpoint.close`."""
        return [*self._between.close(), *self._within.close()]

    def _way(self, source: int) -> RecvEndpoint:
        return self._within if self._is_within(source) else self._between


def per_pair(within: Transport, between: Transport) -> Transport:
    """Combine two transports: `within` a node of the rendezvous' topology, and `between` nodes."""

    def send_endpoint(rendezvous: Rendezvous, rank: int, bucket_bytes: int) -> PerPairSendEndpoint:
        inside = within.send_endpoint(rendezvous, rank, bucket_bytes)
        outside = between.send_endpoint(rendezvous, rank, bucket_bytes, inside.buckets)
        return PerPairSendEndpoint(inside, outside, lambda destination: _is_within(rendezvous, rank, destination))

    def recv_endpoint(
        rendezvous: Rendezvous, rank: int, bucket_bytes: int, check: Callable[[], None]
    ) -> PerPairRecvEndpoint:
        inside = within.recv_endpoint(rendezvous, rank, bucket_bytes, check)
        outside = between.recv_endpoint(rendezvous, rank, bucket_bytes, check)
        return PerPairRecvEndpoint(inside, outside, lambda source: _is_within(rendezvous, source, rank))

    return Transport(send_endpoint, recv_endpoint, between.abort_rendezvous, needs_store=between.needs_store)


def _is_within(rendezvous: Rendezvous, source: int, destination: int) -> bool:
    topology = rendezvous.topology
    return topology is not None and topology.source_node[source] == topology.destination_node[destination]
