"""Counts the bytes that several threads have processed."""

import threading

from converters.stream.run import Progress


class Count:
    """Reports to `progress` how many of `total` bytes are done."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more as done."""
        with self._lock:
            self._done += nbytes
            self._progress(self._done, self._total)
