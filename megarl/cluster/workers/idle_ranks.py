"""Ranks that nothing is asked of for a while, asked now and then whether they live."""

from collections.abc import Sequence
from typing import Any

from megarl.cluster.workers.calls import HEARTBEAT_INTERVAL_S, wait
from megarl.cluster.workers.heartbeats import Heartbeats
from megarl.cluster.workers.worker import Call, Worker
from megarl.cluster.workers.worker_group import WorkerGroup


class IdleRanks:
    """The processes of groups that have nothing to do while the run waits for somebody else."""

    def __init__(self, groups: Sequence[WorkerGroup] = ()) -> None:
        self._workers = [worker for group in groups for worker in group.workers]
        self._heartbeats = Heartbeats[Worker, Call[Any]](HEARTBEAT_INTERVAL_S)

    def raise_if_dead(self) -> None:
        """Raise WorkerGone for one that was found dead, or was silent for as long as it may be."""
        if self._heartbeats.is_due:
            ended, silent = self._heartbeats.look({worker: worker.begin_node for worker in self._workers})
            if silent:
                raise silent[0].end_silent()
            wait(ended)
