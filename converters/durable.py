"""Files and folders that get their names only once complete and on disk, even if the machine crashes."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk."""
AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENOTCONN, errno.EHOSTDOWN)
"""Errors of a network file system, such as NFS or Lustre, whose servers do not answer; it may be back soon."""

SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a machine or process that has temporarily run out of a resource."""


def is_passing(error: BaseException | None) -> bool:
    """Whether a retry may succeed later."""
    if isinstance(error, OSError):
        return error.errno in (*AWAY, *SHORT)
    return error is not None and is_passing(error.__cause__)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means a full disk; safetensors' error has the number only in its text."""
    if isinstance(error, SafetensorError):
        return any(f"(os error {number})" in str(error) for number in DISK_FULL)
    return isinstance(error, OSError) and error.errno in DISK_FULL


def complete(partial: Path, path: Path) -> None:
    """Sync a file or folder that was written as `partial` to disk, then rename it to `path`."""
    sync_all(partial)
    rename(partial, path)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path to write a file to, which then replaces `path`, or after an exception is removed."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        complete(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def sync_all(path: Path) -> None:
    """Wait until a file, or a folder with everything in it, is on disk."""
    for each in [*path.rglob("*"), path] if path.is_dir() else [path]:
        sync(each)


def rename(path: Path, new: Path) -> None:
    """Rename, replacing a file of that name, and wait until the name is on disk."""
    path.replace(new)
    sync(new.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems sync files, but do not know how to sync a folder.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
