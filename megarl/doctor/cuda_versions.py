"""The CUDA that the driver runs, and the one that the installed torch was built for; neither is imported or started."""

import ctypes
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

Version = tuple[int, int]
"""Such as (13, 0)."""
_OF_TORCH = re.compile(r"""^cuda\b[^=\n]*=\s*['"](\d+)\.(\d+)""", re.MULTILINE)


def driver_cuda() -> Version | None:
    """Return the newest CUDA that the driver runs; None without a driver.

    The library is asked rather than nvidia-smi, as in a container it may be newer than the driver (cuda-compat).
    """
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def torch_cuda() -> Version | None:
    """Return the CUDA that the installed torch was built for; None without torch, or if it was built for CPUs."""
    try:
        found = _OF_TORCH.search(Path(str(distribution("torch").locate_file("torch/version.py"))).read_text())
    except (PackageNotFoundError, OSError):
        return None
    return (int(found[1]), int(found[2])) if found else None
