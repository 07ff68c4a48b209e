"""A lock that the kernel lets go of when its process ends, on whatever machine that shares the file."""

import errno
import fcntl
import os
import sys
from pathlib import Path

NOT_SUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a file system without locks."""


def lock_file(path: Path) -> int:
    """A descriptor of the file `path`, made if it is not there, that no other process gets until this one closes it.

    Raises BlockingIOError where another process has it. A file system without locks is told of on standard error.
    """
    while True:
        # For writing: NFS locks nothing that is only read, and no folder for more than one machine.
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(lock, path.parent)
        except BaseException:
            os.close(lock)
            raise
        # The holder removes it, so that what was opened may be gone by then.
        if _is_named(lock, path):
            return lock
        os.close(lock)


def remove_locked(lock: int, *paths: Path) -> None:
    """Remove the file of a descriptor that `lock_file` gave, under whichever of these names it has by now."""
    for path in paths:
        if _is_named(lock, path):
            path.unlink()


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        print(f"{folder} is on a file system without locks: see that no other run writes there", file=sys.stderr)


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError as error:
        # ESTALE: removed by another client of NFS.
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            raise
        return False
