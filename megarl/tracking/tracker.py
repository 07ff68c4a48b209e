"""One object that logs to all loggers."""

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
    """Stores or displays the metrics of a run."""

    def log(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Log the metrics of one step, numbers and histograms. Steps never decrease."""

    def close(self, *, failed: bool = False) -> None:
        """Write what is pending and close; `failed`: the run did not end well."""


@dataclass(frozen=True)
class Run:
    """A run as seen by loggers: it will log the steps `first_step` to `last_step`.

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
        """Return `output_dir`/`name` for a logger to write; a file of a run that this one does not continue is kept.

        It is renamed with the next free number: metrics.jsonl becomes metrics.1.jsonl.
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
    """Passes every step's metrics to all `loggers`; as a context manager it closes them, and tells them of an error."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)

    def log(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Log the metrics of `step`, named as in `megarl.tracking.metrics`."""
        values = {n: value if isinstance(value, Histogram) else float(value) for n, value in metrics.items()}
        for logger in self._loggers:
            logger.log(step, values)

    def close(self, *, failed: bool = False) -> None:
        """Close all loggers, even if one fails to close."""
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
