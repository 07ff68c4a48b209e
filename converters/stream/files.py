"""The files of an output folder, to which several threads write at any offset."""

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
"""Outputs may use one in this many of the files that a process may open: a checkpoint for many ranks has thousands."""


@dataclass
class _File:
    """An open file."""

    descriptor: int
    users: int = 0
    """Number of threads that are writing to it."""
    dirty: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Start, stop and number of the bytes for which write-back has not been started."""


class OutputFiles:
    """Files below `folder`, created when first written to. Use as a context manager; leaving it closes them.

    Only the `most_open` that were last written to stay open, and those being written to. Closing a file takes time,
    because it is first synced to disk. By default, `most_open` is a fraction of the process's limit of open files.
    """

    def __init__(self, folder: Path, *, most_open: int | None = None) -> None:
        self._folder, self._most_open = folder, most_open or _most_open()
        self._open: dict[str, _File] = {}
        """By name; the file last written to is at the end."""
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
        """Write all of `content` at `offset`; write-back to disk starts soon, not only when the file is synced."""
        with self._opened(file) as opened:
            done = 0
            while done < len(content):
                done += os.pwrite(opened.descriptor, content[done:], offset + done)
            self._start_write_back(file, opened, offset, len(content))

    def sync(self) -> None:
        """Sync all open files to disk."""
        for each in self._open.values():
            os.fsync(each.descriptor)

    @contextmanager
    def _opened(self, file: str) -> Iterator[_File]:
        """Open the file, and keep it open inside the context."""
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
        """Files that are open and need not be, least recently written first."""
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
            # For a range that is no longer needed, Linux starts to write its dirty pages back, and returns at once.
            os.posix_fadvise(opened.descriptor, start, nbytes, os.POSIX_FADV_DONTNEED)
        finally:
            self._let_go(opened)


def _most_open() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // _SHARE_OPEN)


def _close_synced(files: Sequence[_File]) -> None:
    """Sync files before closing them, because a later error would not be reported to anybody."""
    with ExitStack() as closing:
        for each in files:
            closing.callback(os.close, each.descriptor)
        for each in files:
            os.fsync(each.descriptor)
