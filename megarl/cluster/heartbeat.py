"""Engines with nothing to do, asked now and then whether they live: nobody else would hear of their death."""

import time
from collections.abc import Collection, Sequence

import ray

from megarl.cluster.engine_handle import EngineHandle
from megarl.cluster.worker_group import Call, WorkerFailed, wait
from megarl.rollout.protocol import Engine

INTERVAL_S = 1.0


class Heartbeat:
    """Asks the engines among `handles` that serve, one call of each at a time."""

    def __init__(self, handles: Sequence[EngineHandle]) -> None:
        self._handles = handles
        self._asked: dict[EngineHandle, Call[int]] = {}
        self._next_s = time.monotonic() + INTERVAL_S

    def dead(self, busy: Collection[EngineHandle]) -> list[EngineHandle]:
        """The engines that were found dead. `busy` are those of which somebody waits for an answer."""
        if time.monotonic() < self._next_s:
            return []
        self._next_s = time.monotonic() + INTERVAL_S
        found = [handle for handle, call in list(self._asked.items()) if self._has_died(handle, call)]
        for handle in self._handles:
            if handle.state == "serving" and handle not in busy and handle not in self._asked:
                self._asked[handle] = handle.begin(Engine.version)
        return found

    def _has_died(self, handle: EngineHandle, call: Call[int]) -> bool:
        """Whether the answer of an engine, if it has come, is that it is dead."""
        done, _ = ray.wait([call.reference], timeout=0)
        if not done:
            return False
        del self._asked[handle]
        try:
            wait([call])
        except WorkerFailed:
            if handle.state != "down":
                raise
            return True
        return False
