"""Sends and receives over TCP by gloo of torch.distributed, between ranks on any machines.

Source and destination ranks share a process group of their own, created from a store and independent of the default
groups of trainer and engine. Destination i has rank sources + i in it. GPU buckets are copied through host memory: gloo
sends only from there. NCCL would need a communicator per pair, in which a send blocks until the receive is posted,
which here happens only after the send is announced.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from megarl.resharding.direct.connections import Address, TransferError
from megarl.resharding.direct.transports.endpoint import (
    BUCKETS,
    OnlyBuckets,
    RecvEndpoint,
    Rendezvous,
    Transport,
    ZeroCopyPiece,
    new_buckets,
)
from megatron_ext import device

_ARRIVED, _NEWS, _ALL_HERE = "arrived", "news", "all ranks are here"
_ANSWER = timedelta(seconds=5)
_LATE_S = 1.0
"""Seconds to wait beyond the timeout for torch's own error, which says more."""

_CAUSES = (("Timed out", " (refit.timeout_s)"), ("closed by peer", ", as a rank is gone"))
"""Gloo's words -> ours."""

R = TypeVar("R")


class TcpSendEndpoint(OnlyBuckets):
    """The sending endpoint: two buckets, and the sends in flight from them."""

    def __init__(self, rendezvous: Rendezvous, rank: int, bucket_bytes: int, buckets: Sequence[Tensor] = ()) -> None:
        self._timeout_s = rendezvous.timeout_s
        self._sources = len(rendezvous.listeners)
        self._group = _join(rendezvous, rank)
        self.buckets = buckets or new_buckets(bucket_bytes)
        self._wires = [Wire.of(bucket) for bucket in self.buckets]
        self._under_way: list[Any] = [None] * BUCKETS

    def offer(self, destination: int) -> Any:
        """Offer nothing: the group is known."""

    def push(self, bucket: int, size_bytes: int, destination: int) -> None:
        """Begin to send."""
        with _errors("sending to", destination):
            packed = self._wires[bucket].filled(size_bytes)
            self._under_way[bucket] = self._group.send([packed], self._sources + destination, bucket)

    def all_connected(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Leave the group."""
        self._under_way, self._wires, self.buckets = [], [], []
        del self._group


class TcpRecvEndpoint(OnlyBuckets):
    """The receiving endpoint: receives into its own two buckets in turn."""

    pulls_at_once = BUCKETS

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        bucket_bytes: int,
        check: Callable[[], None],  # noqa: ARG002 - gloo waits without a pause, and ends when it is over
    ) -> None:
        self._timeout = timedelta(seconds=rendezvous.timeout_s)
        self._group = _join(rendezvous, len(rendezvous.listeners) + rank)
        self._wires = [Wire.of(bucket) for bucket in new_buckets(bucket_bytes)]
        self._pulls = count()

    def connect(self, source: int, offer: Any) -> None:
        """Do nothing: the group is known."""

    def all_connected(self) -> None:
        """Do nothing."""

    def pull(
        self,
        source: int,
        bucket: int,
        size_bytes: int,
        zero_copy: Sequence[ZeroCopyPiece] = (),  # noqa: ARG002
    ) -> Callable[[], Tensor]:
        """Begin to receive."""
        own = self._wires[next(self._pulls) % BUCKETS]
        with _errors("receiving from", source):
            work = self._group.recv([own.on_host[:size_bytes]], source, bucket)
        return partial(self._finish, work, source, own, size_bytes)

    def close(self) -> Sequence[RecvEndpoint]:
        """Leave the group."""
        self._wires = []
        del self._group
        return ()

    def _finish(self, work: Any, source: int, own: "Wire", size_bytes: int) -> Tensor:
        with _errors("receiving from", source):
            work.wait(self._timeout)
        return own.emptied(size_bytes)


@dataclass(frozen=True)
class Wire:
    """A bucket and its host memory, which is the bucket itself if it is on the host."""

    bucket: Tensor
    on_host: Tensor

    @classmethod
    def of(cls, bucket: Tensor) -> "Wire":
        """Make the wire of a bucket on any device."""
        return cls(bucket, bucket if bucket.device.type == "cpu" else device.host_memory(len(bucket)))

    def filled(self, size_bytes: int) -> Tensor:
        """Copy the first `size_bytes` of the bucket to the host; return them there."""
        if self.on_host is not self.bucket:
            self.on_host[:size_bytes].copy_(self.bucket[:size_bytes])
        return self.on_host[:size_bytes]

    def emptied(self, size_bytes: int) -> Tensor:
        """Copy the first `size_bytes` on the host to the bucket; return the bucket."""
        if self.on_host is not self.bucket:
            self.bucket[:size_bytes].copy_(self.on_host[:size_bytes])
        return self.bucket


def _join(rendezvous: Rendezvous, rank: int) -> Any:
    """Join the process group of all sources and destinations; returns when all of them have."""
    if rendezvous.store is None:
        raise ValueError("a rendezvous without a store")
    timeout = timedelta(seconds=rendezvous.timeout_s)
    size = len(rendezvous.listeners) + rendezvous.destinations
    with _errors("rendezvous", rank):
        # Meet at the store first: inside gloo a rank would wait for a dead rank until the timeout, deaf to an abort.
        wait_for_all = partial(_wait_for_all, rendezvous.store, size, timeout)
        store = _answered(timeout, wait_for_all, _named(rendezvous.store))
        return _answered(timeout, partial(_gloo, store, rank, size, timeout), "another rank")


def _answered(timeout: timedelta, ask: Callable[[], R], who: str) -> R:
    """Run `ask` in a thread and return its answer.

    Raises TransferError if `who` is silent too long, else what `ask` raises. torch waits forever for a store whose
    process is suspended; the thread is then abandoned.
    """
    answer = Future[R]()
    Thread(target=_ask, args=(answer, ask), name="store of a refit", daemon=True).start()
    seconds = timeout.total_seconds()
    try:
        return answer.result(seconds + _LATE_S)
    except TimeoutError:
        raise TransferError(f"{who} said nothing for {seconds:g} s (refit.timeout_s)") from None
    finally:
        # Break the reference cycle between an error and this frame.
        del answer


def _ask(answer: Future[R], ask: Callable[[], R]) -> None:
    try:
        answer.set_result(ask())
    except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
        answer.set_exception(error.with_traceback(None))


def _named(address: Address) -> str:
    return "the store at {}:{}".format(*address)


def _store(address: Address, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store, which exists before its address is given out.

    Raises TransferError if it is not reachable.
    """
    # Test the address first: torch would retry for longer than its timeout, and crash the process if that exits
    # meanwhile.
    try:
        socket.create_connection(address, timeout.total_seconds()).close()
    except OSError as error:
        raise TransferError(f"{_named(address)} is not reached: {error.strerror or error}") from error
    return dist.TCPStore(*address, is_master=False, timeout=timeout, wait_for_workers=False)


def _wait_for_all(address: Address, ranks: int, timeout: timedelta) -> dist.TCPStore:
    """Return the store once all ranks have come. Raises TransferError if they do not in time, or on an abort."""
    store = _store(address, timeout)
    if store.add(_ARRIVED, 1) == ranks:
        store.compare_set(_NEWS, "", _ALL_HERE)
    try:
        news = store.get(_NEWS).decode()
    except dist.DistStoreError as error:  # whose text names a key of the store
        seconds = f"{timeout.total_seconds():g} s (refit.timeout_s)"
        raise TransferError(f"fewer than {ranks} ranks came to the store for {seconds}") from error
    if news != _ALL_HERE:
        raise TransferError(news)
    return store


def _abort_rendezvous(rendezvous: Rendezvous, reason: str) -> None:
    """Make the ranks that wait at the store fail, unless all have come already or the store does not answer."""
    assert rendezvous.store is not None
    with suppress(dist.DistError, TransferError):
        _answered(_ANSWER, partial(_leave_news, rendezvous.store, reason), _named(rendezvous.store))


def _leave_news(address: Address, news: str) -> None:
    _store(address, _ANSWER).compare_set(_NEWS, "", news)


def _gloo(store: dist.TCPStore, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs call it Options
    options._timeout = timeout
    # Use neither the address of this machine's hostname nor GLOO_SOCKET_IFNAME, which engines set to loopback.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(store.host, store.port))]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _own_address(host: str, port: int) -> str:
    """This machine's address as the store's machine sees it: loopback if the store is at loopback."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends no packet.
        probe.connect(address)
        return str(probe.getsockname()[0])


@contextmanager
def _errors(action: str, rank: int) -> Iterator[None]:
    try:
        yield
    except TransferError:
        raise
    except RuntimeError as error:  # gloo raises nothing else
        cause = next((cause for said, cause in _CAUSES if said in str(error)), "")
        raise TransferError(f"{action} rank {rank} failed{cause}: {error}") from error


TCP = Transport(TcpSendEndpoint, TcpRecvEndpoint, _abort_rendezvous, needs_store=True)
