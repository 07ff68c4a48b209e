"""Files that the controller itself writes to a checkpoint: by a thread, beside the ranks, which write their own."""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from isal.isal_zlib import crc32

from converters.durable import sync
from converters.stream.targets import Written

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
        # In place of Thread.join: a signal that interrupts it has Python 3.11 and 3.12 take the thread for ended.
        self._has_ended = threading.Event()
        self._failure: BaseException | None = None
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._write_all, name="checkpoint", daemon=True)

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        """Let a file be written after those before; no more can be asked for after `start`."""
        self._waiting.append((self._folder / name, pieces))

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def is_written(self) -> bool:
        """Whether all is on disk. Raises what ended the writing, as OSError."""
        if not self._has_ended.is_set():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def wait(self) -> float:
        """Return when all is on disk: the seconds that it took. Raises as `is_written`."""
        self._has_ended.wait()
        self.is_written()
        return self._seconds

    def end(self) -> None:
        """Return when nothing is written any more, even if it is not all there, or was never begun."""
        self._is_ended.set()
        if self._thread.ident is not None:
            self._has_ended.wait()

    def _write_all(self) -> None:
        began = time.monotonic()
        try:
            while self._waiting and not self._is_ended.is_set():
                path, pieces = self._waiting.pop(0)
                self.written.append(_write(path, pieces, self._is_ended))
                sync(path)
                # With it goes what the pieces are made of, which may be as large as the file.
                del pieces
        except BaseException as error:  # noqa: BLE001 - raised where the thread is waited for
            self._failure = error
        finally:
            self._seconds = time.monotonic() - began
            self._has_ended.set()


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
