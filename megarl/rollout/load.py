"""The load of an engine, step by step, until somebody asks."""

from megarl.rollout.protocol import Load


class Loads:
    """Puts the load after each of some steps together."""

    def __init__(self) -> None:
        self._steps = self._preempted = 0
        self._running = self._waiting = 0.0
        self._kv_used: float | None = None

    def note(self, load: Load) -> None:
        """Count one more step."""
        self._steps += 1
        self._running += load.running
        self._waiting = max(self._waiting, load.waiting)
        self._preempted += load.preempted
        if load.kv_used is not None:
            self._kv_used = max(self._kv_used or 0.0, load.kv_used)

    def together(self) -> Load | None:
        """The load of these steps; None if there was none."""
        if not self._steps:
            return None
        return Load(self._running / self._steps, self._waiting, self._kv_used, self._preempted)
