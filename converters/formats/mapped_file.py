"""A file mapped to memory, read on access."""

import ctypes
import mmap
import os
import weakref
from functools import cache
from pathlib import Path

import torch

_FAILED = ctypes.c_void_p(-1).value


class MappedFile:
    """The bytes of a file, read-only: writing to them crashes the process. Raises OSError if it cannot be mapped.

    Python's `mmap` keeps a descriptor per file (before 3.13 inevitably), and a checkpoint may have more files than a
    process may have descriptors. A writable private mapping would count as committed memory if the kernel does not
    overcommit, and a checkpoint is larger than that.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            nbytes = os.fstat(descriptor).st_size
            self._memory = (ctypes.c_ubyte * nbytes).from_address(_map(descriptor, nbytes, path) if nbytes else 0)
        finally:
            os.close(descriptor)
        if nbytes:
            # Views keep the mapping alive. It is not unmapped at process exit, when a thread may still be reading.
            weakref.finalize(self._memory, _unmap, ctypes.addressof(self._memory), nbytes).atexit = False
        self.view = memoryview(self._memory).cast("B").toreadonly()

    def __getitem__(self, part: slice) -> bytes:
        return bytes(self.view[part])

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """A view of some of the bytes, at least one."""
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_int64]
    libc.munmap.argtypes = [address, size]
    return libc


def _map(descriptor: int, nbytes: int, path: Path) -> int:
    address = _libc().mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return address


def _unmap(address: int, nbytes: int) -> None:
    _libc().munmap(address, nbytes)
