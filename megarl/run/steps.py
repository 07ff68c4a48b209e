"""The loop of all programs: step after step, a log line for each, and a checkpoint where one is due."""

from collections.abc import Callable, Mapping
from typing import Protocol

from megarl.process.signals import asked_to_stop
from megarl.run.checkpoints import Checkpoints
from megarl.run.opening import RunSetup
from megarl.run.timeline import Timeline
from megarl.tracking import MetricValue
from megarl.tracking.clock import Clock


class SteppedRun(Protocol):
    """A run as the loop sees it."""

    @property
    def setup(self) -> RunSetup:
        """The run as it was opened."""

    @property
    def timeline(self) -> Timeline:
        """Records the step that it is for."""

    @property
    def checkpoints(self) -> Checkpoints:
        """Completes what was saved."""

    @property
    def step(self) -> int:
        """How many steps are done."""

    @property
    def is_over(self) -> bool:
        """Whether no further step is to be taken."""

    def log(self, metrics: Mapping[str, MetricValue]) -> None:
        """Give the metrics of the present step to all loggers."""


def run_steps(
    run: SteppedRun,
    clock: Clock,
    *,
    take_step: Callable[[], Mapping[str, MetricValue] | None],
    save: Callable[[], None],
) -> None:
    """Take steps until the run is over or asked to stop; save after the last one, and when a checkpoint is due.

    `take_step` returns the metrics of its step, or None where it found nothing left to do, and the run is over.
    """
    settings = run.setup.config.checkpoint
    with asked_to_stop(waits=settings.on_signal) as stop:
        is_last = run.is_over
        while not is_last:
            with run.timeline.record(run.step + 1):
                metrics = take_step()
            # Logged, then saved: a resumed run cuts off lines that are too many, but cannot write one that is missing.
            if metrics is not None:
                run.log(metrics)
            is_last = run.is_over or stop.end_step()
            with clock.stage("checkpoint"):
                run.checkpoints.complete_if_written()
                if is_last or (settings.every and run.step % settings.every == 0):
                    save()
        run.checkpoints.complete()
