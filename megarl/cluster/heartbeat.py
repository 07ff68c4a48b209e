"""Processes of which nobody waits for an answer, asked now and then whether they live."""

import time
from collections.abc import Collection, Sequence
from typing import Any

import ray

from megarl.cluster.engine_handle import EngineHandle
from megarl.cluster.worker_group import Call, WorkerFailed, WorkerGroup, wait
from megarl.rollout.protocol import Engine

INTERVAL_S = 1.0
_RANKS_INTERVAL_S = 5.0
"""Longer, since there may be thousands."""


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


class Ranks:
    """The processes of groups that have nothing to do while the run waits for somebody else."""

    def __init__(self, groups: Sequence[WorkerGroup] = ()) -> None:
        self._workers = [worker for group in groups for worker in group.workers]
        self._asked: list[Call[Any]] = []
        self._next_s = 0.0

    def look_after(self) -> None:
        """Raise WorkerGone for one that was found dead."""
        references = [call.reference for call in self._asked]
        done = set(ray.wait(references, num_returns=len(references), timeout=0)[0]) if references else set()
        ended = [call for call in self._asked if call.reference in done]
        self._asked = [call for call in self._asked if call.reference not in done]
        wait(ended)
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _RANKS_INTERVAL_S
            asked = {id(call.worker) for call in self._asked}
            self._asked += [worker.begin_node() for worker in self._workers if id(worker) not in asked]
