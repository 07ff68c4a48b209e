"""Prints at intervals what a long step is doing, so that a log shows work from a hang."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_lines(status_line: Callable[[], str], every_s: float) -> Iterator[None]:
    """Print what `status_line` returns, unless it is empty, every so many seconds while what is inside goes on.

    It is called in a thread of its own.
    """
    ended = threading.Event()

    def say() -> None:
        while not ended.wait(every_s):
            if text := status_line():
                print(text, flush=True)

    thread = threading.Thread(target=say, name="progress lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
