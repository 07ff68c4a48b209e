"""Shared-memory segments of one host: made under a name, mapped by the peers, then without a name.

Memory that nothing maps and that has no name is gone: once every peer has mapped a segment and it was unlinked, no
end of a process, `kill -9` included, leaves anything behind.
"""

import errno
import mmap
import os
import uuid
from pathlib import Path

import torch
from torch import Tensor

from converters.errors import UserError

_FOLDER = Path("/dev/shm")


def create_segment(size_bytes: int) -> str:
    """Make a segment of `size_bytes` zeros and return its path, for `map_segment` in any process of this host.

    The memory is reserved here: without that, writing to a full file system would kill the writer.
    Raises UserError if there is not enough.
    """
    path = _FOLDER / f"megarl-{os.getpid()}-{uuid.uuid4().hex}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        path.unlink()
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(
            f"{_FOLDER} has no room for a segment of {size_bytes} bytes: lower refit.bucket_bytes or enlarge {_FOLDER}"
        ) from error
    finally:
        os.close(descriptor)
    return str(path)


def map_segment(path: str, size_bytes: int) -> Tensor:
    """Map the segment at `path`: a uint8 tensor [size_bytes] shared with every process that maps it.

    The mapping lives as long as the tensor or a view of it. Raises ValueError if the segment is smaller.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def unlink_segment(path: str) -> None:
    """Take the name away. The memory stays until the last mapping is gone."""
    os.unlink(path)
