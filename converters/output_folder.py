"""An output folder that gets its name only when it is complete; until then, writing it can be resumed."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from converters.durable import DISK_FULL, complete, is_passing, sync
from converters.errors import UserError
from converters.file_lock import lock_file, remove_locked
from converters.stream.journal import Journal

_PARTIAL = ".partial"
_JOURNAL, _LOCK = ".journal", ".lock"
WORKING_FILES = (_JOURNAL, _LOCK)
"""Files that exist only while the folder is written."""


def refuse_inside(folder: Path, source: Path) -> None:
    """Raise UserError for an output inside the source folder, whose manifest would not list it."""
    written, read = folder.resolve(), source.resolve()
    if written.is_relative_to(read):
        place = source if written == read else f"in {source}"
        raise UserError(f"the output {folder} is {place}, which is read: choose a folder outside of it")


class OutputFolder:
    """`folder` while it is being written, under the name `partial`.

    Use as a context manager, and call `complete` at the end. After Ctrl-C, a kill or a transient error, the partial
    output stays, and is resumed by the next run with the same `purpose`; after any other error it is deleted.

    Raises UserError if `folder` exists, its disk is full, it cannot be written, or another process is writing it.
    """

    def __init__(self, folder: Path, purpose: Mapping[str, Any], *, nbytes: int) -> None:
        """`purpose` identifies the output; `nbytes` is its approximate size."""
        self.folder = folder
        self.partial = folder.parent / (folder.name + _PARTIAL)
        self._purpose, self._nbytes = purpose, nbytes
        self.journal: Journal

    def __enter__(self) -> "OutputFolder":
        if self.folder.exists() or self.folder.is_symlink():
            raise UserError(f"{self.folder} exists; delete it or choose another folder")
        if self._is_in_the_way():
            raise UserError(f"{self.partial} is in the way and no interrupted conversion; move it away")
        self._made = [path for path in (self.partial, *self.partial.parents) if not path.exists()]
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.partial / _LOCK)
        except BlockingIOError as error:
            raise UserError(f"another process is writing {self.partial}; wait for it or stop it") from error
        except OSError as error:
            self._remove_empty()
            raise self._refused(error) from error
        try:
            self._begin()
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.journal.__exit__()
        if isinstance(error, Exception) and not is_passing(error):
            self._delete()
        self._let_go()
        if isinstance(error, OSError):
            raise self._refused(error) from error

    def complete(self) -> None:
        """Give the folder its name, after everything in it is on disk."""
        complete(self.partial, self.folder)
        # Only after the rename: without its journal, the partial output of a killed run could not be resumed.
        (self.folder / _JOURNAL).unlink()
        remove_locked(self._lock, self.folder / _LOCK)
        sync(self.folder)

    def _is_in_the_way(self) -> bool:
        """Whether `partial` is something else than the output of an interrupted run.

        A folder with nothing but a lock is such an output: a run may have been killed before it had a journal.
        """
        if not self.partial.is_dir():
            return self.partial.exists() or self.partial.is_symlink()
        names = {path.name for path in self.partial.iterdir()}
        return not (self.partial / _JOURNAL).is_file() and not names <= {_LOCK}

    def _begin(self) -> None:
        """Open the journal. Raises UserError if that is not possible, and removes everything that it created."""
        try:
            self._check_room()
            self.journal = Journal(self.partial / _JOURNAL, self._purpose)
            if not self.journal.is_begun:
                self._empty()
            self.journal.__enter__()
        except (OSError, UserError) as error:
            if self.partial in self._made:
                self._delete()
            raise (self._refused(error) if isinstance(error, OSError) else error) from error

    def _empty(self) -> None:
        """Delete the output of another purpose."""
        for path in self.partial.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in WORKING_FILES:
                path.unlink()

    def _delete(self) -> None:
        """Delete the output, the journal last, because without it no later run may delete it."""
        with suppress(OSError):
            self._empty()
            (self.partial / _JOURNAL).unlink(missing_ok=True)

    def _let_go(self) -> None:
        """Release the lock so that others can write the folder, and delete the folder if it is empty."""
        with suppress(OSError):
            remove_locked(self._lock, self.partial / _LOCK, self.folder / _LOCK)
        self._remove_empty()
        os.close(self._lock)

    def _remove_empty(self) -> None:
        for path in dict.fromkeys((self.partial, *self._made)):
            with suppress(OSError):
                path.rmdir()

    def _check_room(self) -> None:
        there = sum(path.stat().st_blocks * 512 for path in self.partial.rglob("*") if path.is_file())
        free = shutil.disk_usage(self.partial).free
        if self._nbytes > free + there:
            raise UserError(
                f"{self.folder.parent} has room for {free:,} bytes, and {self._nbytes - there:,} are needed; free"
                " some space or write elsewhere"
            )

    def _refused(self, error: OSError) -> UserError:
        if error.errno in DISK_FULL:
            return UserError(f"{self.folder.parent} has no room ({error.strerror}); free some space or write elsewhere")
        what = f"{error.filename or self.partial} cannot be read or written ({error.strerror})"
        if is_passing(error):
            return UserError(f"{what}; when that has passed, the same command goes on where it was")
        return UserError(f"{what}; change that or choose another folder")
