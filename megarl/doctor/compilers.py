"""Compilers that a node needs when kernels are compiled at first use: Triton's C compiler, and nvcc."""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

C_COMPILER = (
    "install a C compiler and Python's headers there, in the image if it is one (gcc and python3-dev on Debian)"
)
"""The remedy if Triton cannot compile."""
NVCC = "install the CUDA toolkit there, in CUDA_HOME or /usr/local/cuda"
"""The remedy for a node without nvcc."""


@dataclass(frozen=True)
class Compilers:
    """Compilers that this process finds."""

    lacking: tuple[str, ...] = ()
    """Missing requirements of Triton: it compiles a launcher in each new cache, such as that of a Slurm job."""
    has_nvcc: bool = True


def compilers_here() -> Compilers:
    """Search where Triton (3.9) and vLLM (0.32) search."""
    return Compilers(tuple(_lacking()), _nvcc() is not None)


def _lacking() -> Iterator[str]:
    named = os.environ.get("CC")
    if not any(map(shutil.which, ["gcc", "clang"] if named is None else [named])):
        yield "C compiler (gcc or clang)" if named is None else f"C compiler {named} (CC)"
    # Debian has the headers only there.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
    if not header.exists():
        yield str(header)


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which(f"{home}/bin/nvcc")
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
