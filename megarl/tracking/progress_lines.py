"""Periodically prints what a long step is doing, so that a log distinguishes progress from a hang."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_lines(status_line: Callable[[], str], every_s: float) -> Iterator[None]:
    """Print the result of `status_line` every `every_s` seconds, unless it is empty, until the context ends.

    `status_line` is called in a separate thread.
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
