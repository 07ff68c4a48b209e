"""Shared-memory segments without a name, which any process of the host can map.

The kernel frees a segment that nothing maps or holds open, so no death of a process, even by `kill -9`, leaves one
behind.
"""

import errno
import mmap
import os
import weakref
from pathlib import Path

import torch
from torch import Tensor

from converters.errors import UserError

_FOLDER = Path("/dev/shm")


class Segment:
    """A new segment of zeros: `memory` (uint8 [size_bytes]) in this process, and a handle for others of this host.

    The memory is reserved at creation: otherwise a write without enough memory left would kill the writer. Raises
    UserError if there is not enough.
    """

    def __init__(self, size_bytes: int) -> None:
        self._descriptor = os.open(_FOLDER, os.O_RDWR | os.O_TMPFILE, 0o600)
        # If connecting fails, nobody is left to call `close`.
        self._close = weakref.finalize(self, os.close, self._descriptor)
        try:
            os.posix_fallocate(self._descriptor, 0, size_bytes)
        except OSError as error:
            self.close()
            if error.errno != errno.ENOSPC:
                raise
            raise UserError(
                f"{_FOLDER} has no room for a segment of {size_bytes} bytes: lower refit.bucket_bytes or enlarge "
                f"{_FOLDER}"
            ) from error
        self.memory = map_segment(self.handle(), size_bytes)

    def handle(self) -> str:
        """Handle for `map_segment`, valid until `close`."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def all_mapped(self) -> None:
        """Called when all receivers have mapped the segment; no other process can map it afterwards."""
        self._close()

    def close(self) -> None:
        """Invalidate the handle; garbage collection does it, too. The memory stays until the last mapping is gone."""
        self._close()


def map_segment(handle: str, size_bytes: int) -> Tensor:
    """Map the segment of `handle`: a uint8 tensor [size_bytes] shared with every process that maps it.

    The mapping lives as long as the tensor or a view of it. Raises ValueError if the segment is smaller.
    """
    descriptor = os.open(handle, os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)
