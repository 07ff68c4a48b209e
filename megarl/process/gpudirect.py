"""Checks GPUDirect RDMA: whether network cards can access the memory of this machine's GPUs directly."""

import re
from pathlib import Path

GPUDIRECT = (
    "load nvidia_peermem (`modprobe nvidia_peermem` on the host), or install the driver's open kernel modules under"
    " Linux 5.12 or newer"
)
"""The remedy."""
_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
_DMABUF = (5, 12)


def gpudirect_obstacle(root: Path = Path("/")) -> str:
    """Return why they cannot, judging by the loaded kernel modules; empty if they can, or without an NVIDIA driver.

    It takes either a peer-memory module, or the driver's open kernel modules, through dmabuf.
    """
    if any((root / "sys/module" / name).exists() for name in _MODULES):
        return ""
    try:
        driver = (root / "proc/driver/nvidia/version").read_text()
        release = (root / "proc/sys/kernel/osrelease").read_text().strip()
    except OSError:
        return ""
    if "Open Kernel Module" not in driver:
        return "nvidia_peermem is not loaded, and the driver's kernel modules are not the open ones"
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and tuple(map(int, numbers.groups())) < _DMABUF:
        return f"nvidia_peermem is not loaded, and Linux {release} has no dmabuf for it"
    return ""
