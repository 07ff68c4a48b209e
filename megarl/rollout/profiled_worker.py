"""The profiler methods of an engine's worker."""

import os

from megarl.process.profiler import Profiler


class ProfiledWorker:
    """A mixin for workers. It has no constructor, as engines mix it into classes of their own."""

    _profiler: Profiler | None = None

    def part(self) -> int:
        """The index of this worker's machine among those that the engine spans."""
        return 0

    def start_profiler(self, engine_process: int) -> None:
        """Start recording this process, unless it is the engine's own process, which is recorded anyway."""
        if self.part() or os.getpid() != engine_process:
            self._profiler = Profiler()
            self._profiler.start()

    def stop_profiler(self, most_events: int, since_us: float) -> bytes | None:
        """Stop recording; return the events (see `Profiler.stop`), or None if it was not started."""
        profiler, self._profiler = self._profiler, None
        return None if profiler is None else profiler.stop(most_events, since_us)
