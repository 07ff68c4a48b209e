"""Cost of a process and all its descendants: CPU seconds and memory, from Linux's /proc."""

import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil


class ProcessTree:
    """The process `pid` and its descendants, including those that have ended since they were last sampled."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cpu_seconds: dict[psutil.Process, float] = {}

    def cpu_seconds(self) -> float:
        """User and system time of all processes so far; an ended one counts as when it was last sampled."""
        for process in self._alive():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._cpu_seconds[process] = times.user + times.system
        return sum(self._cpu_seconds.values())

    def memory_bytes(self) -> int:
        """Resident memory now (PSS): a page shared by n of the processes counts once and not n times."""
        total = 0
        for process in self._alive():
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total

    def _alive(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


class PeakMemory:
    """Peak memory of `tree` within the context, sampled every `every_s` seconds.

    Sampling has its own thread: it takes tens of milliseconds, and seconds while a process maps its libraries.
    """

    def __init__(self, tree: ProcessTree, every_s: float = 2.0) -> None:
        self.bytes = 0
        self._tree, self._every_s = tree, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(self._every_s):
            self.bytes = max(self.bytes, self._tree.memory_bytes())
