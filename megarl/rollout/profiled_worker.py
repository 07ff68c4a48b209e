"""A worker of an engine whose work is recorded, whatever computes there."""

import os

from megarl.process.profiler import Profiler


class ProfiledWorker:
    """Part of a worker. It has no constructor: libraries make it part of classes of their own."""

    _profiler: Profiler | None = None

    def part(self) -> int:
        """The number of the machine that this worker is on, among those that the engine spans."""
        return 0

    def start_profiler(self, engine_process: int) -> None:
        """Begin to record what this process does, unless it is the engine's own, of which all is recorded."""
        if self.part() or os.getpid() != engine_process:
            self._profiler = Profiler()
            self._profiler.start()

    def stop_profiler(self, most_events: int, since_us: float) -> bytes | None:
        """End that: the events, see `Profiler.stop`; None where it was not begun."""
        profiler, self._profiler = self._profiler, None
        return None if profiler is None else profiler.stop(most_events, since_us)
