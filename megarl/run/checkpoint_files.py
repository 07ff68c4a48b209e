"""The controller's own files of a checkpoint, which a thread writes while the ranks write theirs."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from isal.isal_zlib import crc32

from converters.durable import sync
from converters.stream.targets import Written
from megatron_ext.checkpoint.writing_thread import WritingThread

Piece: TypeAlias = bytes | memoryview
WriteFile: TypeAlias = Callable[[str, Iterable[Piece]], None]
"""(file name, pieces): writes a file, now or later; pieces are generated as they are written."""


def at_once(folder: Path) -> WriteFile:
    """Return a function that writes files of `folder` synchronously. It raises OSError and errors of the pieces."""

    def write(name: str, pieces: Iterable[Piece]) -> None:
        _write(folder / name, pieces, threading.Event())

    return write


class CheckpointFiles:
    """Writes files of a folder one after the other, in a background thread that `start` begins.

    Files are durable only once `is_written`: check before committing the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[tuple[Path, Iterable[Piece]]] = []
        self.written: list[Written] = []
        """The files written so far: all of them once `is_written`."""
        self._is_ended = threading.Event()
        self._thread = WritingThread(self._write_all)

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        """Queue a file; only before `start`."""
        self._waiting.append((self._folder / name, pieces))

    def start(self) -> None:
        """Begin to write the queued files."""
        self._thread.start()

    def is_written(self) -> bool:
        """Whether all files are durable on disk. Raises the exception that ended the writing."""
        return self._thread.is_done()

    def wait(self) -> float:
        """Wait until all files are durable; returns the seconds that writing took. Raises as `is_written`."""
        return self._thread.wait()

    def end(self) -> None:
        """Stop writing, and wait until the thread has ended; files may be incomplete, or never begun."""
        self._is_ended.set()
        self._thread.wait_for_its_end()

    def _write_all(self) -> None:
        while self._waiting and not self._is_ended.is_set():
            path, pieces = self._waiting.pop(0)
            self.written.append(_write(path, pieces, self._is_ended))
            sync(path)
            # The pieces may keep data as large as the file alive.
            del pieces


def _write(path: Path, pieces: Iterable[Piece], is_ended: threading.Event) -> Written:
    nbytes = checksum = 0
    left = iter(pieces)
    with path.open("wb") as file:
        # Check before each piece: the caller of `end` may already have closed the source of the next one.
        while not is_ended.is_set() and (piece := next(left, None)) is not None:
            file.write(piece)
            nbytes += memoryview(piece).nbytes
            checksum = crc32(piece, checksum)
    return Written(path.name, 0, nbytes, checksum)
