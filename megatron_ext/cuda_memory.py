"""Memory of a GPU past torch's allocator: other processes and network cards can map it, whatever that is set to.

With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True torch's memory is virtual memory of CUDA, whose handles are
descriptors of another process, which containers refuse to give. And what torch shares it keeps until each receiver has
said that it lets go, which one that was killed never does. Here memory ends with its owner.
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
"""CUDA cuts smaller memory out of pieces of this size, and a handle would give all of a piece away."""
_HANDLE_BYTES = 64
_OUT_OF_MEMORY = 2


class CudaMemoryError(RuntimeError):
    """CUDA gives or maps no memory; the message says why."""


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
        """Handle for `MappedMemory` in other processes, valid until `close`; of a GPU alone."""
        assert self._range is not None
        found = _value(runtime().cudaIpcGetMemHandle(self._range.address))
        return ctypes.string_at(found.getPtr(), _HANDLE_BYTES)

    def close(self) -> None:
        """Free the memory, when the device has done all that was asked of it: tensors over it lead nowhere then."""
        if self._range is not None:
            self._range.end()


class MappedMemory:
    """Memory of another process: `tensor` (uint8 [size_bytes]) on this process's GPU, wherever it lies, until `close`.

    A handle that is mapped twice leads to the same memory, and is closed twice. Raises CudaMemoryError if CUDA does not
    map it, as in the process that made it.
    """

    def __init__(self, handle: bytes, size_bytes: int) -> None:
        there = runtime().cudaIpcMemHandle_t()
        ctypes.memmove(there.getPtr(), handle, _HANDLE_BYTES)
        _use_own_gpu()
        flags = runtime().cudaIpcMemLazyEnablePeerAccess
        self._range = _Range(_value(runtime().cudaIpcOpenMemHandle(there, flags)), runtime().cudaIpcCloseMemHandle)
        self.tensor = tensor_at(self._range.address, size_bytes, device.device())

    def close(self) -> None:
        """Unmap the memory, when the device has done all that was asked of it: tensors over it lead nowhere then."""
        self._range.end()


class _Range:
    """Addresses that are given back once: at `end`, or with this object where connecting failed and nobody says so.

    At the end of the process the driver does that, whatever still runs.
    """

    def __init__(self, address: int, give_back: Callable[[int], Any]) -> None:
        self.address = address
        self._end = weakref.finalize(self, _give_back, give_back, device.device().index, address)
        self._end.atexit = False

    def end(self) -> None:
        if self._end.alive:
            # After a fault of the GPU nothing runs any more, and this raises for good.
            with suppress(RuntimeError):
                device.synchronize()
            self._end()


def _give_back(give_back: Callable[[int], Any], gpu: int | None, address: int) -> None:
    # After a fault of the GPU all calls are refused, and the memory ends with the process.
    with suppress(RuntimeError), device.on(gpu):
        runtime().cudaSetDevice(gpu or 0)
        give_back(address)


def _allocate(size_bytes: int) -> int:
    """New memory in one piece; what torch keeps for later goes back to the GPU if there is no other left."""
    _use_own_gpu()
    error, address = runtime().cudaMalloc(size_bytes)
    if int(error) == _OUT_OF_MEMORY:
        _forget_error()
        device.empty_cache()
        error, address = runtime().cudaMalloc(size_bytes)
    return int(_value((error, address)))


def _use_own_gpu() -> None:
    """Let this runtime have the current device that torch's has in this thread: each keeps one for itself."""
    _value((*runtime().cudaSetDevice(device.device().index or 0), None))


def _value(result: tuple[Any, Any]) -> Any:
    """The value that a function of CUDA's runtime gives. Raises CudaMemoryError, with its reason, where it failed."""
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
    """Take the last error away: where the runtime is torch's own, torch would report it as that of its next launch."""
    runtime().cudaGetLastError()


def has_runtime() -> bool:
    """Whether memory is that of a GPU."""
    return device.gpus() > 0


@cache
def runtime() -> ModuleType:
    """CUDA's runtime."""
    try:
        return import_module("cuda.bindings.runtime")
    except ImportError as error:
        release = device.cuda_version().partition(".")[0]
        raise CudaMemoryError(
            f'{error}: pip install "cuda-bindings=={release}.*", as torch for CUDA asks for'
        ) from error
