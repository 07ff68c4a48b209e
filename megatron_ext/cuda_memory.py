"""GPU memory outside torch's allocator, which other processes and network cards can map under any allocator settings.

With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True torch uses CUDA's virtual memory, whose handles are file
descriptors, which containers do not let other processes get. Also, torch keeps shared memory until every receiver has
released it, which a killed one never does. Here memory ends with its owner.
"""

import ctypes
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from megatron_ext import device
from megatron_ext.tensor_at import tensor_at

_GRAIN_BYTES = 2**21
"""CUDA suballocates smaller memory from pieces of this size, and a handle would expose the whole piece."""
_HANDLE_BYTES = 64
_OUT_OF_MEMORY = 2


class CudaMemoryError(RuntimeError):
    """CUDA cannot allocate or map memory; the message says why."""


class OwnMemory:
    """New memory of zeros on this process's device: `tensor` (uint8 [size_bytes]), until `close` or the owner's end.

    Raises CudaMemoryError if a GPU has none left.
    """

    def __init__(self, size_bytes: int) -> None:
        self._range: _Range | None = None
        if not has_runtime():
            self.tensor = torch.zeros(size_bytes, dtype=torch.uint8)
            return
        self._range = _Range(_allocate(-(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES), runtime().cudaFree)
        self.tensor = tensor_at(self._range.address, size_bytes, device.device()).zero_()

    def handle(self) -> bytes:
        """Handle for `MappedMemory` in other processes, valid until `close`; only for GPU memory."""
        assert self._range is not None
        found = _value(runtime().cudaIpcGetMemHandle(self._range.address))
        return ctypes.string_at(found.getPtr(), _HANDLE_BYTES)

    def close(self) -> None:
        """Free the memory after the device has finished its work; tensors over it are then invalid."""
        if self._range is not None:
            self._range.end()


class MappedMemory:
    """Memory of another process, mapped until `close`: `tensor` (uint8 [size_bytes]) on this process's GPU.

    The memory may be on another GPU. A handle that is mapped twice must be closed twice. Raises CudaMemoryError if CUDA
    cannot map it, as in the process that created it.
    """

    def __init__(self, handle: bytes, size_bytes: int) -> None:
        there = runtime().cudaIpcMemHandle_t()
        ctypes.memmove(there.getPtr(), handle, _HANDLE_BYTES)
        _use_own_gpu()
        flags = runtime().cudaIpcMemLazyEnablePeerAccess
        self._range = _Range(_value(runtime().cudaIpcOpenMemHandle(there, flags)), runtime().cudaIpcCloseMemHandle)
        self.tensor = tensor_at(self._range.address, size_bytes, device.device())

    def close(self) -> None:
        """Unmap the memory after the device has finished its work; tensors over it are then invalid."""
        self._range.end()


class _Range:
    """An address range that is released once: at `end`, or with this object if connecting failed.

    At process exit the driver releases it.
    """

    def __init__(self, address: int, give_back: Callable[[int], Any]) -> None:
        self.address = address
        self._end = weakref.finalize(self, _give_back, give_back, device.device().index, address)
        self._end.atexit = False

    def end(self) -> None:
        if self._end.alive:
            # After a GPU fault this always raises.
            with suppress(RuntimeError):
                device.synchronize()
            self._end()


def _give_back(give_back: Callable[[int], Any], gpu: int | None, address: int) -> None:
    # After a GPU fault all calls fail, and the memory ends with the process.
    with suppress(RuntimeError), device.on(gpu):
        runtime().cudaSetDevice(gpu or 0)
        give_back(address)


def _allocate(size_bytes: int) -> int:
    """Allocate contiguous memory; if there is none left, empty torch's cache first."""
    _use_own_gpu()
    error, address = runtime().cudaMalloc(size_bytes)
    if int(error) == _OUT_OF_MEMORY:
        _forget_error()
        device.empty_cache()
        error, address = runtime().cudaMalloc(size_bytes)
    return int(_value((error, address)))


def _use_own_gpu() -> None:
    """Set this runtime's current device to torch's in this thread, as each runtime keeps its own."""
    _value((*runtime().cudaSetDevice(device.device().index or 0), None))


def _value(result: tuple[Any, Any]) -> Any:
    """The value returned by a CUDA runtime function. Raises CudaMemoryError, with CUDA's reason, if it failed."""
    error, value = result
    if not int(error):
        return value
    _forget_error()
    (_, name), (_, text) = runtime().cudaGetErrorName(error), runtime().cudaGetErrorString(error)
    reason = f"{name.decode()}, {text.decode()}"
    if int(error) == _OUT_OF_MEMORY:
        _, free, total = runtime().cudaMemGetInfo()
        reason += f": {free:,} of {total:,} bytes are free"
    raise CudaMemoryError(reason)


def _forget_error() -> None:
    """Clear the last error: if the runtime is torch's own, torch would report it at its next launch."""
    runtime().cudaGetLastError()


def has_runtime() -> bool:
    """Whether memory is a GPU's."""
    return device.gpus() > 0


@cache
def runtime() -> ModuleType:
    """The Python bindings of the CUDA runtime. Raises CudaMemoryError if they are not installed."""
    try:
        return import_module("cuda.bindings.runtime")
    except ImportError as error:
        release = device.cuda_version().partition(".")[0]
        raise CudaMemoryError(
            f'{error}: pip install "cuda-bindings=={release}.*", as torch for CUDA asks for'
        ) from error
