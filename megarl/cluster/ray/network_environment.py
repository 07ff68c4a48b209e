"""Environment variables of NCCL, gloo and UCX that depend on a node's network: a table, and the detection behind it."""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from pwd import getpwuid

import psutil

from converters.errors import UserError
from megarl.process.rdma_devices import RdmaPort, active_ports

_ROOT = Path("/")


@dataclass(frozen=True)
class Network:
    """The network of a node."""

    interface: str
    """The interface whose address the other nodes use."""
    ports: tuple[RdmaPort, ...] = ()

    @property
    def fastest(self) -> list[str]:
        """The fastest ports, for the data of a run; slower ones are for storage and management."""
        best = max((port.gbit_per_s for port in self.ports), default=0)
        return [port.name for port in self.ports if port.gbit_per_s == best]


@dataclass(frozen=True)
class Default:
    """A variable, and its value for a network; None leaves it alone."""

    name: str
    value: Callable[[Network], str | None]


DEFAULTS = (
    # Use Ray's interface, whatever the hostname resolves to.
    Default("GLOO_SOCKET_IFNAME", lambda network: network.interface),
    Default("NCCL_SOCKET_IFNAME", lambda network: f"={network.interface}"),
    Default("NCCL_IB_HCA", lambda network: f"={','.join(network.fastest)}" if network.ports else None),
    # 4.096 us x 2^22 = 17 s before a packet counts as lost, because switches of large networks can be slow.
    Default("NCCL_IB_TIMEOUT", lambda network: "22" if network.ports else None),
    Default(
        "UCX_NET_DEVICES",
        lambda network: ",".join([*network.fastest, network.interface]) if network.ports else None,
    ),
)

ON_LOOPBACK: Mapping[str, str | None] = {
    # NCCL prefers other interfaces to loopback, so ranks of one machine would listen where other machines can connect.
    "NCCL_SOCKET_IFNAME": "=lo",
}


def network_environment(address: str, root: Path = _ROOT) -> dict[str, str]:
    """The variables for processes of the node with this address; on loopback only those that keep them there.

    Variables set in the site's NCCL or UCX configuration files are left out, as the environment would override the
    files.
    """
    if ip_address(address).is_loopback:
        values = dict(ON_LOOPBACK)
    elif network := look_at(address, root):
        values = {default.name: default.value(network) for default in DEFAULTS}
    else:
        return {}
    left = names_in_files(root)
    return {name: value for name, value in values.items() if value is not None and name not in left}


def names_in_files(root: Path) -> set[str]:
    """The names of variables in the configuration files that NCCL and UCX read in this process."""
    names = set()
    for prefix, files in (("NCCL_", _nccl_files()), ("UCX_", _ucx_files())):
        for file in files:
            with suppress(OSError):
                lines = (root / file.relative_to("/")).read_text(errors="replace").splitlines()
                names |= {line.partition("=")[0].strip() for line in lines if line.lstrip().startswith(prefix)}
    return names


def _nccl_files() -> Iterator[Path]:
    yield Path("/etc/nccl.conf")
    if named := os.environ.get("NCCL_CONF_FILE"):
        yield Path(named).absolute()
    else:
        with suppress(KeyError):  # in a container the user may not exist
            yield Path(getpwuid(os.getuid()).pw_dir, ".nccl.conf")


def _ucx_files() -> Iterator[Path]:
    for folder in ("/etc/ucx", os.environ.get("HOME"), os.environ.get("UCX_CONFIG_DIR"), "."):
        if folder is not None:
            yield Path(folder).absolute() / "ucx.conf"


def address_of(interface: str) -> str:
    """The IPv4 address of an interface of this machine, such as ib0. Raises UserError if it has none."""
    here = {
        name: each.address
        for name, addresses in psutil.net_if_addrs().items()
        for each in reversed(addresses)
        if each.family == socket.AF_INET
    }
    if interface not in here:
        raise UserError(
            f"{socket.gethostname()} has no interface {interface!r} with an IPv4 address: give SOCKET_IFNAME one"
            f" that all nodes have, of {' '.join(sorted(here.keys() - {'lo'}))}"
        )
    return here[interface]


def look_at(address: str, root: Path = _ROOT) -> Network | None:
    """Detect the network of this machine at `address`; None if no interface has the address, as behind NAT."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return Network(interface, active_ports(root))
    return None
