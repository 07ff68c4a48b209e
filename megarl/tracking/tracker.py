"""One place to log to, whatever loggers are behind it."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from megarl.tracking.histogram import Histogram, MetricValue


class Logger(Protocol):
    """Keeps or shows the metrics of a run."""

    def log(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Take the metrics of one step, numbers and histograms. Steps don't fall."""

    def close(self, *, failed: bool = False) -> None:
        """Write out what is pending and end; `failed`: the run did not end well."""


@dataclass(frozen=True)
class Run:
    """A run as loggers know it: it will log the steps `first_step` to `last_step`.

    `resumed`: it continues an earlier run in the same `output_dir`, whose metrics from `first_step` on are void.
    """

    output_dir: Path
    first_step: int
    last_step: int
    project: str = "megarl"
    run_name: str = "run"
    resumed: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def place(self, name: str) -> Path:
        """`output_dir`/`name`, for a logger to write; what a run left there that this one does not continue is kept.

        It gets the name with the next free number, metrics.1.jsonl for metrics.jsonl.
        """
        path = self.output_dir / name
        if self.resumed or not path.exists() or (path.is_file() and not path.stat().st_size):
            return path
        names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
        kept = next(other for other in names if not other.exists())
        path.rename(kept)
        print(f"{path} is of an earlier run and is kept as {kept.name}", file=sys.stderr, flush=True)
        return path


class Tracker:
    """Hands every step's metrics to all `loggers`; a context manager that closes them, and tells them of an error."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)

    def log(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Log the metrics of `step`, by the names of `megarl.tracking.metrics`."""
        values = {n: value if isinstance(value, Histogram) else float(value) for n, value in metrics.items()}
        for logger in self._loggers:
            logger.log(step, values)

    def close(self, *, failed: bool = False) -> None:
        """Close all loggers, the later ones too when an earlier one fails."""
        with ExitStack() as stack:
            for logger in reversed(self._loggers):
                stack.callback(logger.close, failed=failed)
        self._loggers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)
