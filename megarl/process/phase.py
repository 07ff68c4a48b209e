"""Shows the current phase of a run that has no metrics to show yet."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_DOT_EVERY_S = 2.0


@contextmanager
def phase(what: str, stream: TextIO | None = None, dot_every_s: float = _DOT_EVERY_S) -> Iterator[None]:
    """Print `what` on standard error, then a dot every two seconds, and in the end the time taken, all on one line.

    After an exception only the line is ended, so that the next message starts on a new one.
    """
    stream = stream or sys.stderr
    stream.write(f"{what} ")
    stream.flush()
    ended = threading.Event()
    dots = threading.Thread(target=_write_dots, args=(stream, ended, dot_every_s), name="phase", daemon=True)
    dots.start()
    started, took = time.monotonic(), ""
    try:
        yield
        took = f" {time.monotonic() - started:.0f} s"
    finally:
        ended.set()
        dots.join()
        stream.write(f"{took}\n")
        stream.flush()


def _write_dots(stream: TextIO, ended: threading.Event, every_s: float) -> None:
    while not ended.wait(every_s):
        stream.write(".")
        stream.flush()
