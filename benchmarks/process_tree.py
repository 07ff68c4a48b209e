"""What a process and all its descendants cost: CPU seconds and memory, from Linux' /proc."""

from contextlib import suppress

import psutil


class ProcessTree:
    """The process `pid` and its descendants, those included that have ended since they were last looked at."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cpu_seconds: dict[psutil.Process, float] = {}

    def cpu_seconds(self) -> float:
        """User and system time of all processes so far; one that has ended counts as when it was last seen."""
        for process in self._alive():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._cpu_seconds[process] = times.user + times.system
        return sum(self._cpu_seconds.values())

    def memory_bytes(self) -> int:
        """Resident memory now, with a page that n of the processes share counted once and not n times (PSS)."""
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
