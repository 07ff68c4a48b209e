"""Engines of which nobody waits for an answer, asked now and then whether they live."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.heartbeats import Heartbeats
from megarl.cluster.workers.worker import Call, Worker, WorkerFailed
from megarl.rollout.protocol import Engine

INTERVAL_S = 1.0
"""How often whoever waits for engines looks after them."""


class EngineHeartbeats:
    """Asks the engines among `handles` that serve, one call of each process at a time.

    An engine answers between two steps: one that computes for ever, or waits for what never comes, is silent.
    """

    def __init__(self, handles: Sequence[EngineHandle]) -> None:
        self._handles = handles
        self._heartbeats = Heartbeats[Worker, Call[Any]](INTERVAL_S)

    def note_deaths(self) -> None:
        """Note which engines have died, and end those that were silent for as long as they may be.

        Raises what an engine failed of that has not died.
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
            # It may have been heard of otherwise, and others be in its place.
            if any(call.worker in handle.processes and handle.state != "down" for handle in self._handles):
                raise
