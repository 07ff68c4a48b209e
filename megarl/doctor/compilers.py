"""Compilers that a node needs when kernels are first used there: Triton's, and that of CUDA."""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

C_COMPILER = (
    "install a C compiler and Python's headers there, in the image if it is one (gcc and python3-dev on Debian)"
)
"""The remedy where Triton compiles nothing."""
NVCC = "install the CUDA toolkit there, in CUDA_HOME or /usr/local/cuda"
"""The remedy for a node without nvcc."""


@dataclass(frozen=True)
class Compilers:
    """Compilers that a process finds."""

    lacking: tuple[str, ...] = ()
    """Needs of Triton that are not there: it compiles a launcher in each new cache, as every job of Slurm has."""
    has_nvcc: bool = True


def compilers_here() -> Compilers:
    """Look where Triton (3.9) and vLLM (0.32) look."""
    return Compilers(tuple(_lacking()), _nvcc() is not None)


def _lacking() -> Iterator[str]:
    named = os.environ.get("CC")
    if not any(map(shutil.which, ["gcc", "clang"] if named is None else [named])):
        yield "C compiler (gcc or clang)" if named is None else f"C compiler {named} (CC)"
    # Debian has headers there alone.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
    if not header.exists():
        yield str(header)


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which(f"{home}/bin/nvcc")
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
