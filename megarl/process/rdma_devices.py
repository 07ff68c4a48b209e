"""InfiniBand, RoCE and EFA devices that this process can use, and their ports."""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

USABLE_PORT = (
    "give a container the devices (docker run --device /dev/infiniband; with enroot MELLANOX_VISIBLE_DEVICES=all), and"
    " see with ibstat that a port is Active"
)
"""The remedy for `ports_obstacle`."""


@dataclass(frozen=True)
class RdmaPort:
    """A port that is up and usable, such as RdmaPort("mlx5_0:1", 400)."""

    name: str
    gbit_per_s: float


def rdma_devices(root: Path = Path("/")) -> set[str]:
    """The devices' names, such as mlx5_0.

    A container without any still sees the host's in /sys, so a device counts only if its file can be opened.
    """
    found = set()
    for verbs in (root / "sys/class/infiniband_verbs").glob("uverbs*"):
        try:
            os.close(os.open(root / "dev/infiniband" / verbs.name, os.O_RDWR))
        except OSError:
            continue
        found.add((verbs / "ibdev").read_text().strip())
    return found


def active_ports(root: Path = Path("/")) -> tuple[RdmaPort, ...]:
    """The ports of `rdma_devices` that are up; the kernel shows state "4: ACTIVE" and rate "400 Gb/sec (4X NDR)".

    NCCL and UCX skip all others.
    """
    devices, found = rdma_devices(root), []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device = port.parents[1].name
        if device in devices and (port / "state").read_text().split()[-1] == "ACTIVE":
            found.append(RdmaPort(f"{device}:{port.name}", float((port / "rate").read_text().split()[0])))
    return tuple(found)


def ports_obstacle(root: Path = Path("/")) -> str:
    """Return why no port can be used although the kernel has devices; empty if one can, or without any device."""
    names = sorted(path.read_text().strip() for path in (root / "sys/class/infiniband_verbs").glob("uverbs*/ibdev"))
    if not names or active_ports(root):
        return ""
    if devices := sorted(rdma_devices(root)):
        return f"no port of {', '.join(devices)} is up"
    return f"{', '.join(names)} cannot be opened in /dev/infiniband"


def has_verbs() -> bool:
    """Whether libibverbs, which programs need for them, is installed. Without it NCCL silently uses sockets."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return True
