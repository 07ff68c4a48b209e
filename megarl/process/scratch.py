"""Temporary folders, of a run or of a server: open to their owner alone, and gone with them, or with a later one."""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path

from converters.errors import UserError
from converters.file_lock import NOT_SUPPORTED
from megarl.process.file_system import is_shared
from megarl.process.signals import held

_LONGEST_SOCKET = 107
"""Bytes of the path of a Unix socket."""
_PREFIX = "megarl-"
_MARKER = "held"
_SEGMENTS = "megarl-segments"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Names this machine, and its containers, until it is started again."""
_SHARED_MEMORY = Path("/dev/shm")
_SHORT = (Path("/tmp"), _SHARED_MEMORY)
"""Folders with room for sockets whose paths are too long below TMPDIR."""


@contextmanager
def scratch_folder(socket: str = "") -> Iterator[Path]:
    """A new folder with mode 0700, removed with the context; also removes folders left by this user's killed runs.

    It lies below TMPDIR; where the path of a Unix socket that will be in it, `socket`, is too long there, below /tmp.

    A marker in it, locked as long as the process lives, says that it is ours and whether it is still in use. The kernel
    keeps the lock, so that a run of another container that shares /tmp counts as alive, too.
    """
    _remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=_parent(socket)))
    owner, lock = os.getpid(), _hold(folder)
    try:
        yield folder
    finally:
        # A forked process drops what it has of this one, and the folder is none of its own.
        if os.getpid() == owner:
            with held():
                _remove(folder)
                os.close(lock)


def scratch_folder_of_process() -> Path:
    """A `scratch_folder` that is there until this process exits."""
    left = ExitStack()
    # Processes of multiprocessing run no atexit functions, and forked ones do not run their parent's finalizers.
    Finalize(None, left.close, exitpriority=0)
    return left.enter_context(scratch_folder())


def note_segment(folder: Path, name: str) -> None:
    """Have the segment of shared memory `name` go with a scratch folder, whoever makes it, and however that one ends.

    It may be noted again, and before it is made.
    """
    (folder / _SEGMENTS).mkdir(exist_ok=True)
    (folder / _SEGMENTS / name).touch()


def _prefix() -> str:
    return f"{_PREFIX}{os.getpid()}-"


def _parent(socket: str) -> Path:
    usual = Path(tempfile.gettempdir())
    room = _LONGEST_SOCKET - len(os.fsencode(f"/{_prefix()}12345678/{socket}"))
    if not socket or len(os.fsencode(usual)) <= room:
        return usual
    for folder in _SHORT:
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise UserError(
        f"below TMPDIR={usual} the paths of sockets are too long, and neither {' nor '.join(map(str, _SHORT))} can be"
        f" written: set TMPDIR to a folder whose path has at most {room} bytes"
    )


def _remove(folder: Path) -> None:
    # The files of a server lie in the folder of its run.
    for note in folder.rglob(f"{_SEGMENTS}/*"):
        (_SHARED_MEMORY / note.name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _hold(folder: Path) -> int:
    """Lock the marker before it gets its name: an unlocked marker means that its process is dead."""
    unnamed = folder / f"{_MARKER}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):
        os.write(lock, _BOOT.read_bytes())
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        # Without locks, as on some mounts of Lustre, nobody takes the marker for a dead process's.
        if error.errno not in NOT_SUPPORTED:
            raise
    unnamed.rename(folder / _MARKER)
    return lock


def _remove_stale() -> None:
    """Remove the folders of dead processes; on a shared file system only the folders of this machine.

    On a shared file system, a lock may be visible only on the machine that holds it.
    """
    for parent in {Path(tempfile.gettempdir()), *_SHORT}:
        of_several = is_shared(parent)
        for folder in parent.glob(f"{_PREFIX}*"):
            if not _is_ours(folder) or (of_several and not _is_of_this_machine(folder)):
                continue
            if (lock := _take(folder / _MARKER)) is not None:
                _remove(folder)
                os.close(lock)


def _is_ours(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _is_of_this_machine(folder: Path) -> bool:
    """Whether a folder was made here since the machine was started."""
    try:
        return (folder / _MARKER).read_bytes() == _BOOT.read_bytes()
    except OSError:
        return False


def _take(marker: Path) -> int | None:
    """A descriptor that holds the lock of `marker`; None where there is no marker or another process holds it."""
    try:
        lock = os.open(marker, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
