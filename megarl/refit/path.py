"""The shape of a path: how weights get from the trainer's ranks into engines that have begun an update."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from megarl.cluster.engines.engines import Engines
from megarl.cluster.workers.worker import Worker, WorkerFailed
from megarl.resharding.transfer_stats import TransferStats


@dataclass(frozen=True)
class Receivers:
    """The engines that a path ends at, and whether they are ready for what is sent."""

    engines: Engines
    workers: Sequence[Worker]
    """The process that answered for each engine when it was set: a restart gives it another one."""
    are_connected: bool = False

    @classmethod
    def of(cls, engines: Engines) -> Self:
        """Engines that are not connected yet."""
        return cls(engines, engines.workers())

    def matches(self, engines: Engines) -> bool:
        """Whether these are the same engines, and none was restarted."""
        return engines.workers() == self.workers


class WeightPath(Protocol):
    """One way of the weights. There are two, direct and through the engines' loader."""

    is_direct: bool

    @property
    def description(self) -> str:
        """The path of the next weights, in a few words."""

    def set_engines(self, engines: Engines) -> None:
        """End at these engines from now on, of the same kind: a subset, or with replacements for engines that died."""

    def send(self, version: int) -> TransferStats:
        """Give all weights to engines that have begun the update to `version`. How much was moved."""

    def recover(self, failure: WorkerFailed) -> None:
        """Prepare to send again after `failure`; raise it, or a clearer error, if sending again cannot help."""

    def next_path(self, version: int) -> "WeightPath":
        """Return the path of the next refits, now that the engines have `version`, which the ranks still have."""
