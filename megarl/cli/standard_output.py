"""Watches standard output, whose reader may go away, or whose disk may fill up; opens streams that are closed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from megarl.process.errors import RunFailed


def open_closed_streams() -> None:
    """Open the null device for standard streams that the caller has closed, whose numbers later files would get."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest free number, which is its own.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))


def discard(stream: TextIO) -> None:
    """Lead a stream to the null device, since text left in its buffers would fail again at exit."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


class OutputLost(RunFailed):
    """Standard output is lost: not an OSError, since those are handled as errors of files, or ignored."""

    may_resume = False

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.happened = f"the output was not taken any more ({error.strerror})"
        self.sentence = f"{self.happened}: what is above is not all"
        self.details = ""


class _Watched:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._watched():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._watched():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            discard(self._stream)
            raise OutputLost(error) from error


@contextmanager
def watched_output() -> Iterator[None]:
    """Raise OutputLost if output printed inside cannot be written."""
    stream = sys.stdout
    watched = _Watched(stream)
    sys.stdout = watched
    try:
        try:
            yield
        finally:
            watched.flush()
    finally:
        sys.stdout = stream
