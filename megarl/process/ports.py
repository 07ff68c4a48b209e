"""Free ports of a machine."""

import secrets
import socket
from pathlib import Path

from converters.errors import UserError
from megatron_ext.loopback import LOOPBACK

_KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000


def free_port(host: str = LOOPBACK, port: int = 0) -> int:
    """Return `port`, or with 0 any port, that was free on `host` just now. Raises UserError if `port` is in use."""
    if port == 0:
        return next((each for each in _quiet_ports() if _refusal(host, each) is None), None) or _any_port(host)
    if refusal := _refusal(host, port):
        raise UserError(
            f"port {port} of {host} cannot be used ({refusal.strerror}): free it, or set cluster.rendezvous_port to "
            "another, or to 0 for any that is free"
        ) from refusal
    return port


def _quiet_ports() -> list[int]:
    """Ports outside the kernel's ephemeral range, in random order: a free one stays free until it is used."""
    first_of_kernel = int(_KERNEL_PORTS.read_text().split()[0]) if _KERNEL_PORTS.exists() else 0
    quiet = range(_FIRST_PORT, max(_FIRST_PORT, first_of_kernel))
    return secrets.SystemRandom().sample(quiet, len(quiet))


def _any_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _refusal(host: str, port: int) -> OSError | None:
    """The error of binding a port; None if it is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
