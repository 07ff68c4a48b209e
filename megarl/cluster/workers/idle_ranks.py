"""Heartbeats of ranks that have no calls for a while."""

from collections.abc import Sequence
from typing import Any

from megarl.cluster.workers.calls import HEARTBEAT_INTERVAL_S, wait
from megarl.cluster.workers.heartbeats import Heartbeats
from megarl.cluster.workers.worker import Call, Worker
from megarl.cluster.workers.worker_group import WorkerGroup


class IdleRanks:
    """The processes of groups that are idle while the run waits for something else."""

    def __init__(self, groups: Sequence[WorkerGroup] = ()) -> None:
        self._workers = [worker for group in groups for worker in group.workers]
        self._heartbeats = Heartbeats[Worker, Call[Any]](HEARTBEAT_INTERVAL_S)

    def raise_if_dead(self) -> None:
        """Raise WorkerGone if one is dead, or was silent for too long."""
        if self._heartbeats.is_due:
            ended, silent = self._heartbeats.look({worker: worker.begin_node for worker in self._workers})
            if silent:
                raise silent[0].end_silent()
            wait(ended)
