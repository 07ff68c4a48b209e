"""A file lock that the kernel releases when its process ends, across all machines that share the file."""

import errno
import fcntl
import os
import sys
from pathlib import Path

NOT_SUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a file system without locks."""


def lock_file(path: Path) -> int:
    """Lock the file `path`, creating it if necessary; return a descriptor that holds the lock until it is closed.

    Raises BlockingIOError if another process holds the lock. Warns on standard error if the file system has no locks.
    """
    while True:
        # Opened for writing: NFS does not lock files opened for reading, nor folders across machines.
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(lock, path.parent)
        except BaseException:
            os.close(lock)
            raise
        # The holder may have removed the file after it was opened here.
        if _is_named(lock, path):
            return lock
        os.close(lock)


def remove_locked(lock: int, *paths: Path) -> None:
    """Remove the file of a descriptor from `lock_file`, under whichever of these names it has now."""
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
