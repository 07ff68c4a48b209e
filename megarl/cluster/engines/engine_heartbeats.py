"""Heartbeats of engines that nobody is waiting for."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.heartbeats import Heartbeats
from megarl.cluster.workers.worker import Call, Worker, WorkerFailed
from megarl.rollout.protocol import Engine

INTERVAL_S = 1.0
"""How often a thread that waits for engines checks on them."""


class EngineHeartbeats:
    """Asks the serving engines among `handles` for a sign of life, one call per process at a time.

    An engine answers between two steps, so one that hangs in a step is silent.
    """

    def __init__(self, handles: Sequence[EngineHandle]) -> None:
        self._handles = handles
        self._heartbeats = Heartbeats[Worker, Call[Any]](INTERVAL_S)

    def note_deaths(self) -> None:
        """Note dead engines, and kill those that were silent for too long.

        Raises the failure of an engine that is still alive.
        """
        if not self._heartbeats.is_due:
            return
        questions: dict[Worker, Callable[[], Call[Any]]] = {}
        for handle in self._handles:
            if handle.state == "serving":
                questions |= {part: part.begin_node for part in handle.parts}
                questions[handle.worker] = partial(handle.begin, Engine.version)
        ended, silent = self._heartbeats.look(questions)
        for worker in silent:
            worker.end_silent()
        for call in ended:
            self._hear(call)

    def _hear(self, call: Call[Any]) -> None:
        try:
            wait([call])
        except WorkerFailed:
            # Its death may be known already, and other processes may have taken its place.
            if any(call.worker in handle.processes and handle.state != "down" for handle in self._handles):
                raise
