"""The load of an engine, step by step, until somebody asks."""

from megarl.rollout.protocol import Load


class Loads:
    """Puts the load after each of some steps together."""

    def __init__(self) -> None:
        self._steps = 0
        self._running = self._waiting = 0.0
        self._kv_used: float | None = None

    def note(self, load: Load) -> None:
        """Count one more step."""
        self._steps += 1
        self._running += load.running
        self._waiting = max(self._waiting, load.waiting)
        if load.kv_used is not None:
            self._kv_used = max(self._kv_used or 0.0, load.kv_used)

    def together(self) -> Load | None:
        """The load of these steps; None if there was none."""
        return Load(self._running / self._steps, self._waiting, self._kv_used) if self._steps else None
