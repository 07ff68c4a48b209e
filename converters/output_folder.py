"""An output folder that has its name only when it is complete, and until then can be continued."""

import fcntl
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from converters.durable import DISK_FULL, complete, sync
from converters.errors import UserError
from converters.stream.journal import Journal

_PARTIAL = ".partial"
_JOURNAL = ".journal"


def refuse_inside(folder: Path, source: Path) -> None:
    """Raise UserError for an output in the folder that is read, which would then hold what its manifest does not."""
    written, read = folder.resolve(), source.resolve()
    if written.is_relative_to(read):
        place = source if written == read else f"in {source}"
        raise UserError(f"the output {folder} is {place}, which is read: choose a folder outside of it")


class OutputFolder:
    """`folder` while it is written, under the name `partial`.

    Use as a context manager, and call `complete` in the end. After Ctrl-C or a kill what is written stays, and the
    same `purpose` finds it again; after any other error it is deleted.
    Raises UserError where `folder` exists, its disk is full, it cannot be written, or another process writes it.
    """

    def __init__(self, folder: Path, purpose: Mapping[str, Any], *, nbytes: int) -> None:
        """`purpose` tells what is written, `nbytes` about how much."""
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
            self._lock = os.open(self.partial, os.O_RDONLY)
        except OSError as error:
            self._remove_empty()
            raise self._refused(error) from error
        try:
            self._lock_alone()
            self._begin()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.journal.__exit__()
        if isinstance(error, Exception):
            self._remove()
        os.close(self._lock)
        if isinstance(error, OSError):
            raise self._refused(error) from error

    def complete(self) -> None:
        """Give the folder its name: everything in it is on disk before."""
        complete(self.partial, self.folder)
        # Not before the folder is whole under its name: a kill in between would leave what nobody can continue.
        (self.folder / _JOURNAL).unlink()
        sync(self.folder)

    def _is_in_the_way(self) -> bool:
        """An empty folder is not: a run may have been killed before it had a journal."""
        if not self.partial.is_dir():
            return self.partial.exists() or self.partial.is_symlink()
        return not (self.partial / _JOURNAL).is_file() and any(self.partial.iterdir())

    def _begin(self) -> None:
        """Open the journal; UserError, with nothing left that was not there before, where that is not possible."""
        try:
            self._check_room()
            self.journal = Journal(self.partial / _JOURNAL, self._purpose)
            if not self.journal.is_begun:
                self._empty()
            self.journal.__enter__()
        except (OSError, UserError) as error:
            if self.partial in self._made:
                self._remove()
            raise (self._refused(error) if isinstance(error, OSError) else error) from error

    def _empty(self) -> None:
        """Delete what was written for another purpose, the journal last: without it nobody may."""
        for path in self.partial.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _JOURNAL:
                path.unlink()

    def _remove(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        self._remove_empty()

    def _remove_empty(self) -> None:
        for path in self._made:
            with suppress(OSError):
                path.rmdir()

    def _lock_alone(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is writing {self.partial}; wait for it or stop it") from error

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
        where = error.filename or self.partial
        return UserError(f"{where} cannot be read or written ({error.strerror}); change that or choose another folder")
