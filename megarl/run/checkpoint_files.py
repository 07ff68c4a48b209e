"""Files that the controller itself writes to a checkpoint: by a thread, beside the ranks, which write their own."""

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
"""Writes a file of this name, at once or later: the pieces are made when they are written."""


def at_once(folder: Path) -> WriteFile:
    """A way to write files of a folder while the caller waits. It raises OSError, and what making the pieces does."""

    def write(name: str, pieces: Iterable[Piece]) -> None:
        _write(folder / name, pieces, threading.Event())

    return write


class CheckpointFiles:
    """Files of a folder, which are written one after the other from `start` on. The caller goes on meanwhile.

    They are on the disk itself once `is_written`: whoever names the checkpoint has to ask.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[tuple[Path, Iterable[Piece]]] = []
        self.written: list[Written] = []
        """The files, whole: all of them once `is_written`."""
        self._is_ended = threading.Event()
        self._thread = WritingThread(self._write_all)

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        """Let a file be written after those before; no more can be asked for after `start`."""
        self._waiting.append((self._folder / name, pieces))

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def is_written(self) -> bool:
        """Whether all is on disk. Raises what ended the writing, as OSError."""
        return self._thread.is_done()

    def wait(self) -> float:
        """Return when all is on disk: the seconds that it took. Raises as `is_written`."""
        return self._thread.wait()

    def end(self) -> None:
        """Return when nothing is written any more, even if it is not all there, or was never begun."""
        self._is_ended.set()
        self._thread.wait_for_its_end()

    def _write_all(self) -> None:
        while self._waiting and not self._is_ended.is_set():
            path, pieces = self._waiting.pop(0)
            self.written.append(_write(path, pieces, self._is_ended))
            sync(path)
            # With it goes what the pieces are made of, which may be as large as the file.
            del pieces


def _write(path: Path, pieces: Iterable[Piece], is_ended: threading.Event) -> Written:
    nbytes = checksum = 0
    left = iter(pieces)
    with path.open("wb") as file:
        # Whoever ended it may have ended, too, what the next piece would be made of.
        while not is_ended.is_set() and (piece := next(left, None)) is not None:
            file.write(piece)
            nbytes += memoryview(piece).nbytes
            checksum = crc32(piece, checksum)
    return Written(path.name, 0, nbytes, checksum)
