"""CUDA's runtime, played by shared memory: what buckets ask of it, and what is held at any time."""

import ctypes
import fcntl
import os
from dataclasses import dataclass, field

from megatron_ext import cuda_memory, device

OUT_OF_MEMORY, INVALID_DEVICE_CONTEXT, MAP_FAILED, NOT_SUPPORTED = 2, 201, 205, 801
NAMES = {
    OUT_OF_MEMORY: (b"cudaErrorMemoryAllocation", b"out of memory"),
    INVALID_DEVICE_CONTEXT: (b"cudaErrorDeviceUninitialized", b"invalid device context"),
    MAP_FAILED: (b"cudaErrorMapBufferObjectFailed", b"mapping of buffer object failed"),
    NOT_SUPPORTED: (b"cudaErrorNotSupported", b"operation not supported"),
}
GPU = "GPU-played"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Handle:
    """A `cudaIpcMemHandle_t`: 64 bytes, in which stand the size and a path to the memory."""

    def __init__(self):
        self._bytes = (ctypes.c_char * 64)()

    def getPtr(self):  # noqa: N802
        return ctypes.addressof(self._bytes)

    @property
    def raw(self):
        return bytes(self._bytes)


CONSTANTS = {"cudaIpcMemHandle_t": Handle, "cudaIpcMemLazyEnablePeerAccess": 1}


@dataclass
class PlayedCuda:
    """The runtime of one process. An address that was given back is no memory any more: whoever reads it dies."""

    allocated: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Address -> descriptor and size."""
    opened: dict[int, tuple[bytes, int, int]] = field(default_factory=dict)
    """Address -> handle, size, and how often it is open."""
    freed_while_open: list[int] = field(default_factory=list)
    """Addresses that were given back while somebody had them open, after which CUDA may do anything."""
    calls: list[str] = field(default_factory=list)
    refusals: dict[str, list[int]] = field(default_factory=dict)
    """By function, the errors of its next calls; 0 is none."""
    last_error: int = 0
    maps_own: bool = False
    """Whether it maps memory of its own process, too, which CUDA does not."""
    _locks: dict[int, int] = field(default_factory=dict)
    """By address that is open, the descriptor of a lock that its owner sees, and that ends with this process."""

    def __getattr__(self, name):
        if name in CONSTANTS:
            return CONSTANTS[name]
        try:
            function = getattr(type(self), f"_{name}")
        except AttributeError:
            raise AttributeError(name) from None

        def call(*arguments):
            self.calls.append(name)
            refusals = self.refusals.get(name)
            if error := refusals.pop(0) if refusals else 0:
                self.last_error = error
                return error, None
            return function(self, *arguments)

        return call

    def _cudaSetDevice(self, index):  # noqa: N802
        return (0,)

    def _cudaGetLastError(self):  # noqa: N802
        error, self.last_error = self.last_error, 0
        return (error,)

    def _cudaGetErrorName(self, error):  # noqa: N802
        return 0, NAMES[error][0]

    def _cudaGetErrorString(self, error):  # noqa: N802
        return 0, NAMES[error][1]

    def _cudaMemGetInfo(self):  # noqa: N802
        return 0, 1000, 80_000

    def _cudaMalloc(self, size):  # noqa: N802
        descriptor = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE, 0o600)
        os.ftruncate(descriptor, size)
        address = _map(descriptor, size)
        ctypes.memset(address, 0xAB, size)
        self.allocated[address] = descriptor, size
        return 0, address

    def _cudaFree(self, address):  # noqa: N802
        descriptor, size = self.allocated.pop(address)
        if _is_locked(descriptor):
            self.freed_while_open.append(address)
        os.close(descriptor)
        _libc.munmap(address, size)
        return (0,)

    def _cudaIpcGetMemHandle(self, address):  # noqa: N802
        descriptor, size = self.allocated[address]
        handle = Handle()
        ctypes.memmove(handle.getPtr(), f"{size} /proc/{os.getpid()}/fd/{descriptor}".encode().ljust(64, b"\0"), 64)
        return 0, handle

    def _cudaIpcOpenMemHandle(self, handle, flags):  # noqa: N802
        assert flags == CONSTANTS["cudaIpcMemLazyEnablePeerAccess"]
        size, path = handle.raw.rstrip(b"\0").decode().split()
        if f"/{os.getpid()}/" in path and not self.maps_own:
            self.last_error = INVALID_DEVICE_CONTEXT
            return INVALID_DEVICE_CONTEXT, None
        for address, (raw, length, count) in self.opened.items():
            if raw == handle.raw:
                self.opened[address] = raw, length, count + 1
                return 0, address
        descriptor = os.open(path, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        address = _map(descriptor, int(size))
        self._locks[address] = descriptor
        self.opened[address] = handle.raw, int(size), 1
        return 0, address

    def _cudaIpcCloseMemHandle(self, address):  # noqa: N802
        raw, size, count = self.opened.pop(address)
        if count > 1:
            self.opened[address] = raw, size, count - 1
        else:
            _libc.munmap(address, size)
            os.close(self._locks.pop(address))
        return (0,)


def _is_locked(descriptor):
    """Whether somebody else has the memory open."""
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(own)
    return False


def _map(descriptor, size):
    address = _libc.mmap(None, size, 3, 1, descriptor, 0)  # read and write, shared
    assert address not in (None, ctypes.c_void_p(-1).value)
    return address


def play_cuda(replace=setattr):
    """Let buckets of this process lie in the memory that is played; the runtime."""
    played = PlayedCuda()
    replace(cuda_memory, "has_runtime", lambda: True)
    replace(cuda_memory, "runtime", lambda: played)
    replace(device, "uuid", lambda index=None: GPU)
    replace(device, "reaches", lambda other: other == GPU)
    return played
