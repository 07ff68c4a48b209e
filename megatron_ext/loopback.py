"""Keeps torch's rendezvous off the network when all ranks are on this machine.

torch is imported inside the functions, so that a process without ranks need not import it.
"""

import socket
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
_LOOPBACK_NAMES = (LOOPBACK, "localhost", "::1")


def listen_on_loopback() -> None:
    """Make the store of a rendezvous at a loopback address listen only there; idempotent.

    torch (2.11 to 2.14) binds it to all interfaces, regardless of the address.
    """
    # Imported by name, because the package's attribute `rendezvous` is a function.
    rendezvous: Any = import_module("torch.distributed.rendezvous")
    if rendezvous._create_c10d_store.__module__ != __name__:
        rendezvous._create_c10d_store = _listening_on_loopback(rendezvous._create_c10d_store)


def is_loopback(url: str) -> bool:
    """Whether torch's `init_method`, such as tcp://127.0.0.1:29500, is a loopback address."""
    return urlsplit(url).hostname in _LOOPBACK_NAMES


def open_store(host: str, timeout: timedelta) -> "TCPStore":
    """Open a store in this process, reachable at its `port` on `host`; at a loopback address only from this machine."""
    from torch.distributed import TCPStore

    if host not in _LOOPBACK_NAMES:
        return TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    listener = socket.create_server((host, 0), family=_family(host))
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _listening_on_loopback(elsewhere: Callable[..., "TCPStore"]) -> Callable[..., "TCPStore"]:
    from torch.distributed import TCPStore

    def create_store(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> TCPStore:
        if hostname not in _LOOPBACK_NAMES:
            return elsewhere(hostname, port, rank, world_size, timeout, use_libuv)
        is_master = rank == 0
        listener = socket.create_server((hostname, port), family=_family(hostname)).detach() if is_master else None
        return TCPStore(
            host_name=hostname,
            port=port,
            world_size=world_size,
            is_master=is_master,
            timeout=timeout,
            multi_tenant=True,
            master_listen_fd=listener,
            use_libuv=use_libuv,
        )

    return create_store


def _family(hostname: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in hostname else socket.AF_INET
