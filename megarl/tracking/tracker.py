"""One place to log to, whatever loggers are behind it."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from megarl.tracking.histogram import Histogram, MetricValue


class Logger(Protocol):
    """Keeps or shows the metrics of a run."""

    def log(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Take the metrics of one step, numbers and histograms. Steps don't fall."""

    def close(self) -> None:
        """Write out what is pending and end."""


@dataclass(frozen=True)
class Run:
    """What loggers know of a run: it will log the steps `first_step` to `last_step`.

    `resumed`: it continues an earlier run in the same `output_dir`, whose metrics from `first_step` on are void.
    """

    output_dir: Path
    first_step: int
    last_step: int
    project: str = "megarl"
    run_name: str = "run"
    resumed: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


class Tracker:
    """Hands every step's metrics to all `loggers`; a context manager that closes them."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)

    def log(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Log the metrics of `step`, by the names of `megarl.tracking.metrics`."""
        values = {n: value if isinstance(value, Histogram) else float(value) for n, value in metrics.items()}
        for logger in self._loggers:
            logger.log(step, values)

    def close(self) -> None:
        """Close all loggers, the later ones too when an earlier one fails."""
        with ExitStack() as stack:
            for logger in reversed(self._loggers):
                stack.callback(logger.close)
        self._loggers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
