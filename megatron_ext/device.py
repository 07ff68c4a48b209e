"""Where Megatron runs: the only module that distinguishes between CPU and CUDA.

Megatron-core is written for CUDA and NCCL. Without a GPU, `install` applies the replacements of `cuda_on_cpu`; with one
it changes nothing.
"""

import contextlib
import functools
import importlib.util
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext import cuda_on_cpu
from megatron_ext.near_cpus import stay_near


def install() -> None:
    """Make this process ready for megatron-core; idempotent.

    Raises RuntimeError if megatron was already imported, as it binds some of the replaced functions on import.
    """
    if torch.cuda.is_available() or cuda_on_cpu.is_installed():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron_ext.device.install() must run before the first import of megatron")
    cuda_on_cpu.install()
    multiply_by_onednn()


def multiply_by_onednn() -> None:
    """Multiply float32 matrices by oneDNN on AMD CPUs, where MKL, torch 2.13's default, is half as fast.

    torch uses oneDNN only if rounding to bfloat16 inside is allowed. oneDNN rounds with AMX, on ARM and on GPUs, but
    computes in float32 on AMD CPUs, none of which has AMX.
    """
    if _is_amd() and not torch.cpu._is_amx_tile_supported():
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]


@functools.cache
def _is_amd() -> bool:
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and "AuthenticAMD" in cpus.read_text()


def device() -> torch.device:
    """Where this rank's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def name() -> str:
    """The kind of device, such as "NVIDIA H100 80GB HBM3", or cpu."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def backend() -> str:
    """The collective backend of `device`: nccl or gloo."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def gpus() -> int:
    """How many GPUs this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def bind(rank: int) -> None:
    """Select this process's GPU, and pin the process to the CPUs close to it.

    The GPU is number LOCAL_RANK if the launcher set that, else `rank` modulo the number of GPUs of the host.
    """
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        own: Any = torch.cuda.get_device_properties(index)
        stay_near(f"{own.pci_domain_id:04x}:{own.pci_bus_id:02x}:{own.pci_device_id:02x}.0")


def with_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` for another thread: CUDA's current device is per thread, and initially GPU 0."""
    if not torch.cuda.is_available():
        return function
    current = torch.cuda.current_device()

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        torch.cuda.set_device(current)
        return function(*arguments, **options)

    return call


def on(gpu: int | None) -> contextlib.AbstractContextManager:
    """Context in which this thread's current GPU is number `gpu`; None changes nothing."""
    return contextlib.nullcontext() if gpu is None else torch.cuda.device(gpu)


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's modules can be used."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def uuid(index: int | None = None) -> str:
    """The UUID of a GPU, by default this process's own, which is the same in every process of the host."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).uuid)


def reaches(other: str) -> bool:
    """Whether this process's GPU can read the memory of the GPU with UUID `other`; True if unknown."""
    own = torch.cuda.current_device()
    visible = {uuid(index): index for index in range(torch.cuda.device_count())}
    return visible.get(other, own) == own or torch.cuda.can_device_access_peer(own, visible[other])


def cuda_version() -> str:
    """The CUDA version that torch is built for, such as 13.0; empty for a CPU build."""
    return torch.version.cuda or ""


def compute_capability() -> tuple[int, int] | None:
    """The compute capability of this process's GPU, such as (9, 0) for an H100; None without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def has_e4m3(where: torch.device) -> bool:
    """Whether a device has instructions to convert to e4m3: GPUs from compute capability 8.9 on."""
    return where.type == "cuda" and torch.cuda.get_device_capability(where) >= (8, 9)


def synchronize() -> None:
    """Wait until the device has finished all queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class SideStream:
    """A stream of its own on this process's GPU. On a CPU all work is synchronous."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def entered(self) -> contextlib.AbstractContextManager:
        """Context in which this thread's work goes to this stream, which does not wait for work queued elsewhere."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        """Wait for the work of this stream only."""
        if self._stream is not None:
            self._stream.synchronize()


def peak_memory_bytes() -> int:
    """The most memory that this process has held on its device: GPU allocations, or resident memory on CPU.

    A refit's buckets are not counted, as torch did not allocate them.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def used_memory_bytes() -> int | None:
    """How much memory of this process's GPU is in use by all processes; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def empty_cache() -> None:
    """Return torch's cached memory to the GPU."""
    if torch.cuda.is_initialized():
        # Memory that other processes had mapped is only released by this check.
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def gpu_rng_state() -> Tensor | None:
    """State of the default random generator of this process's GPU; None without a GPU."""
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def set_gpu_rng_state(state: Tensor) -> None:
    """Restore that generator; does nothing without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)


def sent(values: Tensor, where: torch.device) -> Tensor:
    """Copy host values to a device, asynchronously for a GPU."""
    # A copy from unpinned memory would wait until the GPU has finished all earlier work.
    return values.pin_memory().to(where, non_blocking=True) if where.type == "cuda" else values.to(where)


HOST_BUCKET_BYTES = 2**28
"""Size of a piece of pinned host memory. Pinned memory is allocated in powers of two, so this wastes nothing."""


def host_memory(size_bytes: int) -> Tensor:
    """Host memory, uint8 [size_bytes], pinned if there is a GPU."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
