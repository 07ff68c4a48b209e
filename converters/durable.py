"""Files and folders that have their name only when they are complete and on disk, whenever the machine ends."""

import errno
import os
from pathlib import Path

from safetensors import SafetensorError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that say that there is no room."""
AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENOTCONN, errno.EHOSTDOWN)
"""Errors of a file system whose servers do not answer, as NFS and Lustre have them: it may be back soon."""

SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a machine or a process that has no more of something: there may be some again."""


def is_passing(error: BaseException | None) -> bool:
    """Whether the same may be possible a while later."""
    if isinstance(error, OSError):
        return error.errno in (*AWAY, *SHORT)
    return error is not None and is_passing(error.__cause__)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that there is no room; that of safetensors has the number in its text alone."""
    if isinstance(error, SafetensorError):
        return any(f"(os error {number})" in str(error) for number in DISK_FULL)
    return isinstance(error, OSError) and error.errno in DISK_FULL


def complete(partial: Path, path: Path) -> None:
    """Give a file or a folder that was written as `partial` its name `path`; all of it is on disk before."""
    sync_all(partial)
    rename(partial, path)


def sync_all(path: Path) -> None:
    """Wait until a file, or a folder with everything in it, is on disk."""
    for each in [*path.rglob("*"), path] if path.is_dir() else [path]:
        sync(each)


def rename(path: Path, new: Path) -> None:
    """Rename, in place of a file of that name, and wait until the name is on disk."""
    path.replace(new)
    sync(new.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
