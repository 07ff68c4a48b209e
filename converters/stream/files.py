"""The files of an output folder, written at any place by several threads."""

import os
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_WRITE_BACK_BYTES = 2**23
_SHARE_OPEN = 4
"""One of so many files that a process may have open is an output: a checkpoint for many ranks has thousands."""


@dataclass
class _File:
    """An open file."""

    descriptor: int
    users: int = 0
    """How many write to it at this moment."""
    dirty: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Start, stop and number of the bytes that the disk has not begun with."""


class OutputFiles:
    """Files below `folder`, made when first written to. Use as a context manager: leaving it closes them.

    Only the `most_open` that were last written to are open, and those that are being written to. To close one takes
    time, since all of it is on disk before: by default a part of what the process may have open is.
    """

    def __init__(self, folder: Path, *, most_open: int | None = None) -> None:
        self._folder, self._most_open = folder, most_open or _most_open()
        self._open: dict[str, _File] = {}
        """By name, the one that was last written to at the end."""
        self._lock = threading.Lock()
        self._background = ThreadPoolExecutor(1)

    def __enter__(self) -> "OutputFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._background.shutdown(cancel_futures=True)
        for each in self._open.values():
            os.close(each.descriptor)
        self._open.clear()

    def write(self, file: str, content: memoryview, offset: int) -> None:
        """Write all of `content` at `offset`; the disk begins with it soon, not only when the file is synced."""
        with self._opened(file) as opened:
            done = 0
            while done < len(content):
                done += os.pwrite(opened.descriptor, content[done:], offset + done)
            self._start_write_back(file, opened, offset, len(content))

    def sync(self) -> None:
        """Return when everything is on disk."""
        for each in self._open.values():
            os.fsync(each.descriptor)

    @contextmanager
    def _opened(self, file: str) -> Iterator[_File]:
        """The file, which stays open meanwhile."""
        with self._lock:
            opened = self._open.pop(file, None) or self._opened_anew(file)
            self._open[file] = opened
            opened.users += 1
            surplus = self._surplus()
        try:
            _close_synced(surplus)
            yield opened
        finally:
            self._let_go(opened)

    def _let_go(self, opened: _File) -> None:
        with self._lock:
            opened.users -= 1

    def _opened_anew(self, file: str) -> _File:
        path = self._folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        return _File(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))

    def _surplus(self) -> list[_File]:
        """Files that are open and need not be, those first that were not written to for longest."""
        if len(self._open) <= self._most_open:
            return []
        idle = [name for name, each in self._open.items() if not each.users]
        return [self._open.pop(name) for name in idle[: len(self._open) - self._most_open]]

    def _start_write_back(self, file: str, opened: _File, offset: int, nbytes: int) -> None:
        with self._lock:
            start, stop, dirty = opened.dirty
            start, stop, dirty = (min(start, offset) if dirty else offset), max(stop, offset + nbytes), dirty + nbytes
            opened.dirty = [start, stop, dirty] if dirty < _WRITE_BACK_BYTES else [0, 0, 0]
        if dirty >= _WRITE_BACK_BYTES and hasattr(os, "posix_fadvise"):
            self._background.submit(self._write_back, file, start, stop - start)

    def _write_back(self, file: str, start: int, nbytes: int) -> None:
        with self._lock:
            opened = self._open.get(file)
            if opened is None:  # synced since
                return
            opened.users += 1
        try:
            # Linux starts to write the dirty pages of a range that is said not to be needed, and returns at once.
            os.posix_fadvise(opened.descriptor, start, nbytes, os.POSIX_FADV_DONTNEED)
        finally:
            self._let_go(opened)


def _most_open() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // _SHARE_OPEN)


def _close_synced(files: Sequence[_File]) -> None:
    """Close files once all of them is on disk: nobody else is told of an error that comes later."""
    with ExitStack() as closing:
        for each in files:
            closing.callback(os.close, each.descriptor)
        for each in files:
            os.fsync(each.descriptor)
