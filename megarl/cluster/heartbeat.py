"""Processes of engines of which nobody waits for an answer, asked now and then whether they live."""

import time
from collections.abc import Collection, Sequence
from typing import Any

import ray

from megarl.cluster.engine_handle import EngineHandle
from megarl.cluster.worker_group import Call, WorkerFailed, wait
from megarl.rollout.protocol import Engine

INTERVAL_S = 1.0


class Heartbeat:
    """Asks the engines among `handles` that serve, one call of each process at a time."""

    def __init__(self, handles: Sequence[EngineHandle]) -> None:
        self._handles = handles
        self._asked: list[tuple[EngineHandle, Call[Any]]] = []
        self._next_s = time.monotonic() + INTERVAL_S

    def dead(self, busy: Collection[EngineHandle]) -> list[EngineHandle]:
        """The engines that were found dead. `busy` are those of which somebody waits for an answer."""
        if time.monotonic() < self._next_s:
            return []
        self._next_s = time.monotonic() + INTERVAL_S
        found = [handle for handle, call in list(self._asked) if self._has_died(handle, call)]
        asked = [call.worker for _, call in self._asked]
        for handle in self._handles:
            if handle.state == "serving":
                calls = [part.begin_node() for part in handle.parts if part not in asked]
                if handle not in busy and handle.worker not in asked:
                    calls.append(handle.begin(Engine.version))
                self._asked += [(handle, call) for call in calls]
        return list(dict.fromkeys(found))

    def _has_died(self, handle: EngineHandle, call: Call[Any]) -> bool:
        """Whether the answer of an engine's process, if it has come, is that the engine is dead."""
        done, _ = ray.wait([call.reference], timeout=0)
        if not done:
            return False
        self._asked.remove((handle, call))
        try:
            wait([call])
        except WorkerFailed:
            if call.worker not in handle.processes:
                return False  # it was heard of otherwise, and others are in its place
            if handle.state != "down":
                raise
            return True
        return False
