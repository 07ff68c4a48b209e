"""Aggregates an engine's load over the steps between two queries."""

from megarl.rollout.protocol import Load


class Loads:
    """Aggregates the load after each step."""

    def __init__(self) -> None:
        self._steps = self._preempted = 0
        self._running = self._waiting = 0.0
        self._kv_used: float | None = None

    def note(self, load: Load) -> None:
        """Add the load after one step."""
        self._steps += 1
        self._running += load.running
        self._waiting = max(self._waiting, load.waiting)
        self._preempted += load.preempted
        if load.kv_used is not None:
            self._kv_used = max(self._kv_used or 0.0, load.kv_used)

    def together(self) -> Load | None:
        """The aggregate load; None if there was no step."""
        if not self._steps:
            return None
        return Load(self._running / self._steps, self._waiting, self._kv_used, self._preempted)
