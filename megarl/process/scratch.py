"""Temporary folders of a run or server: accessible to their owner only, removed with it or by a later one."""

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
"""Maximum length in bytes of a Unix socket's path."""
_PREFIX = "megarl-"
_MARKER = "held"
_SEGMENTS = "megarl-segments"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Identifies this boot of the machine, containers included."""
_SHARED_MEMORY = Path("/dev/shm")
_SHORT = (Path("/tmp"), _SHARED_MEMORY)
"""Folders for sockets whose paths are too long below TMPDIR."""


@contextmanager
def scratch_folder(socket: str = "") -> Iterator[Path]:
    """Create a folder with mode 0700, removed with the context; also remove folders left by this user's killed runs.

    It is below TMPDIR, or below /tmp if the path of a Unix socket named `socket` in it would be too long.

    A marker file in it says that the folder is ours. It is locked as long as the process lives, so the lock says
    whether the folder is in use. The kernel keeps the lock, which works across containers that share /tmp.
    """
    _remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=_parent(socket)))
    owner, lock = os.getpid(), _hold(folder)
    try:
        yield folder
    finally:
        # A forked process leaves this context, too, but does not own the folder.
        if os.getpid() == owner:
            with held():
                _remove(folder)
                os.close(lock)


def scratch_folder_of_process() -> Path:
    """A `scratch_folder` that lasts until this process exits."""
    left = ExitStack()
    # Processes of multiprocessing skip atexit functions, and forked ones do not run their parent's finalizers.
    Finalize(None, left.close, exitpriority=0)
    return left.enter_context(scratch_folder())


def note_segment(folder: Path, name: str) -> None:
    """Have the shared-memory segment `name` removed with a scratch folder, however the process that creates it ends.

    A segment may be noted repeatedly, and before it exists.
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
    # The folders of a run's servers are inside the run's folder.
    for note in folder.rglob(f"{_SEGMENTS}/*"):
        (_SHARED_MEMORY / note.name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _hold(folder: Path) -> int:
    """Lock the marker before renaming it into place: an unlocked marker means that its process is dead."""
    unnamed = folder / f"{_MARKER}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):
        os.write(lock, _BOOT.read_bytes())
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        # Without file locks, as on some Lustre mounts, nobody takes the marker for a dead process's.
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
    """Whether a folder was created on this machine since its last boot."""
    try:
        return (folder / _MARKER).read_bytes() == _BOOT.read_bytes()
    except OSError:
        return False


def _take(marker: Path) -> int | None:
    """A descriptor that holds the lock of `marker`; None if there is no marker or another process holds the lock."""
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
