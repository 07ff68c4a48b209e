"""Sends and receives of torch.distributed, gloo or NCCL, between ranks on any machines.

Source and destination ranks meet in a process group of their own, made from a store: the default groups of the
trainer and of the engine know nothing of it. Destination i has rank sources + i in it.
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.transports.endpoint import BUCKETS, Rendezvous, Transport
from megatron_ext import device


class PointToPointSendEndpoint:
    """Two buckets, and the sends that are under way from them."""

    def __init__(self, rendezvous: Rendezvous, rank: int, bucket_bytes: int) -> None:
        self._timeout_s = rendezvous.timeout_s
        self._sources = len(rendezvous.listeners)
        self._group = _join(rendezvous, rank)
        self.buckets: Sequence[Tensor] = _buckets(bucket_bytes)
        self._under_way: list[Any] = [None] * BUCKETS

    def offer(self) -> Any:
        """Offer nothing: the group is known."""

    def push(self, bucket: int, size_bytes: int, destination: int) -> None:
        """Begin to send."""
        with _errors("sending to", destination):
            self._under_way[bucket] = self._group.send(
                [self.buckets[bucket][:size_bytes]], self._sources + destination, bucket
            )

    def all_connected(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Leave the group."""
        self._under_way, self.buckets = [], []
        del self._group


class PointToPointRecvEndpoint:
    """Two buckets of its own, into which pulls go in turn."""

    pulls_at_once = BUCKETS

    def __init__(self, rendezvous: Rendezvous, rank: int, bucket_bytes: int) -> None:
        self._timeout = timedelta(seconds=rendezvous.timeout_s)
        self._group = _join(rendezvous, len(rendezvous.listeners) + rank)
        self._buckets = _buckets(bucket_bytes)
        self._pulls = count()

    def connect(self, source: int, offer: Any) -> None:
        """Do nothing: the group is known."""

    def pull(self, source: int, bucket: int, size_bytes: int) -> Callable[[], Tensor]:
        """Begin to receive."""
        own = self._buckets[next(self._pulls) % BUCKETS]
        with _errors("receiving from", source):
            work = self._group.recv([own[:size_bytes]], source, bucket)
        return partial(self._finish, work, source, own)

    def close(self) -> None:
        """Leave the group."""
        self._buckets = []
        del self._group

    def _finish(self, work: Any, source: int, bucket: Tensor) -> Tensor:
        with _errors("receiving from", source):
            work.wait(self._timeout)
        return bucket


def _buckets(size_bytes: int) -> list[Tensor]:
    return [torch.zeros(size_bytes, dtype=torch.uint8, device=device.device()) for _ in range(BUCKETS)]


def _join(rendezvous: Rendezvous, rank: int) -> Any:
    """The process group of all sources and destinations; returns when all of them have come."""
    if rendezvous.store is None:
        raise ValueError("a rendezvous without a store")
    timeout = timedelta(seconds=rendezvous.timeout_s)
    size = len(rendezvous.listeners) + rendezvous.destinations
    with _errors("rendezvous", rank):
        store = dist.TCPStore(*rendezvous.store, is_master=False, timeout=timeout, wait_for_workers=False)
        return _GROUPS[device.backend()](store, rank, size, timeout)


def _gloo(store: dist.TCPStore, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs call it Options
    options._timeout = timeout
    # Neither what this machine's name resolves to nor GLOO_SOCKET_IFNAME, which engines have at loopback.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(store.host, store.port))]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _own_address(host: str, port: int) -> str:
    """This machine's address in the eyes of the one with the store: loopback if that is where the store is."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing.
        probe.connect(address)
        return str(probe.getsockname()[0])


def _nccl(store: dist.TCPStore, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


_GROUPS: Mapping[str, Callable[..., Any]] = {"gloo": _gloo, "nccl": _nccl}


@contextmanager
def _errors(action: str, rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # all that gloo and NCCL raise
        raise TransferError(f"{action} rank {rank} failed: {error}") from error


POINT_TO_POINT = Transport(PointToPointSendEndpoint, PointToPointRecvEndpoint, needs_store=True)
