"""Ensures that only one run writes to an output folder."""

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from converters.errors import UserError
from converters.file_lock import lock_file, remove_locked
from megarl.output.places import CHECKPOINTS
from megarl.process.errors import MayPass

LOCK = ".lock"


class HeldError(MayPass):
    """The folder is locked by another process, or by a lost machine: NFSv3 keeps a lock until its client is back."""


@contextmanager
def free_folder(folder: Path) -> Iterator[Path]:
    """Lock `folder`, or the first of FOLDER-2, FOLDER-3 ... that no other process has locked; see `sole_writer`."""
    with ExitStack() as stack:
        for number in count(1):
            own = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
            try:
                stack.enter_context(sole_writer(own))
            except HeldError:
                continue
            break
        yield own


@contextmanager
def sole_writer(folder: Path) -> Iterator[Path]:
    """Create `folder` if needed, and lock it for this process; the kernel releases the lock when the process ends.

    Raises UserError if another process has locked it, on any machine that shares it, or if it is not writable.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
    except BlockingIOError as error:
        held = HeldError(
            f"another run is writing {folder} ({_holder(folder)}): wait for it, stop it, remove {folder / LOCK} if its"
            " machine is gone, or choose another output_dir"
        )
        held.has_run_before = any((folder / CHECKPOINTS).glob("iter_*[0-9]"))
        raise held from error
    except OSError as error:
        where = error.filename or folder
        raise UserError(f"{where} cannot be written ({error.strerror}): choose another output_dir") from error
    try:
        yield folder
    finally:
        # It may have been removed, and created by another run since.
        remove_locked(lock, folder / LOCK)
        if made:
            with suppress(OSError):
                folder.rmdir()
        os.close(lock)


def _lock(folder: Path) -> int:
    """A descriptor of the locked file, which names its holder."""
    lock = lock_file(folder / LOCK)
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {platform.node()}".encode())
    return lock


def _holder(folder: Path) -> str:
    with suppress(FileNotFoundError):
        return (folder / LOCK).read_text() or "it has just begun"
    return "it has just ended"
