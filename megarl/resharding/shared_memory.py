"""Shared-memory segments of one host: memory without a name, which any process of the host can map.

A segment that nothing maps or holds open is gone, so no end of a process, `kill -9` included, leaves anything behind.
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

    The memory is reserved here: without that, writing to a full file system would kill the writer.
    Raises UserError if there is not enough.
    """

    def __init__(self, size_bytes: int) -> None:
        self._descriptor = os.open(_FOLDER, os.O_RDWR | os.O_TMPFILE, 0o600)
        # Where connecting fails, nobody is left to close what was made for it.
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
        """Take note that whoever is to map the segment has: nobody else can any more."""
        self._close()

    def close(self) -> None:
        """Let nobody else map the segment; its end does that, too. The memory stays until the last mapping is gone."""
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
