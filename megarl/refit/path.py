"""The interface of a path: how weights get from the trainer's ranks into engines that have begun an update."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from megarl.cluster.engines.engines import Engines
from megarl.cluster.workers.worker import Worker, WorkerFailed
from megarl.resharding.transfer_stats import TransferStats


@dataclass(frozen=True)
class Receivers:
    """The engines that a path sends to, and whether they are connected."""

    engines: Engines
    workers: Sequence[Worker]
    """The process of each engine when the engines were set; a restarted engine has another one."""
    are_connected: bool = False

    @classmethod
    def of(cls, engines: Engines) -> Self:
        """Make receivers that are not connected yet."""
        return cls(engines, engines.workers())

    def matches(self, engines: Engines) -> bool:
        """Whether these are the same engines, and none was restarted."""
        return engines.workers() == self.workers


class WeightPath(Protocol):
    """A path of the weights. There are two: direct, and through the engines' loader."""

    is_direct: bool

    @property
    def description(self) -> str:
        """The path of the next refit, in a few words."""

    def set_engines(self, engines: Engines) -> None:
        """Send to these engines from now on: a subset of the previous ones, or with replacements for dead ones."""

    def send(self, version: int) -> TransferStats:
        """Send all weights to engines that have begun the update to `version`; return how much was moved."""

    def recover(self, failure: WorkerFailed) -> None:
        """Prepare to send again after `failure`; raise it, or a clearer error, if sending again cannot help."""

    def next_path(self, version: int) -> "WeightPath":
        """Return the path of later refits. Called when the engines have `version` and the ranks still do."""
