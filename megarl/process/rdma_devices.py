"""Devices of InfiniBand, RoCE and EFA that this process can use."""

import ctypes
import os
from pathlib import Path


def rdma_devices(root: Path = Path("/")) -> set[str]:
    """Their names, such as mlx5_0.

    A container that was given none still sees the host's in /sys: a device counts where its file can be opened.
    """
    found = set()
    for verbs in (root / "sys/class/infiniband_verbs").glob("uverbs*"):
        try:
            os.close(os.open(root / "dev/infiniband" / verbs.name, os.O_RDWR))
            found.add((verbs / "ibdev").read_text().strip())
        except OSError:
            continue
    return found


def has_verbs() -> bool:
    """Whether the library is here by which programs use them. NCCL goes over sockets without, and says nothing."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return True
