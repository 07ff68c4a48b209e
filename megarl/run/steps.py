"""The loop of all programs: step after step, a log line for each, and a checkpoint where one is due."""

import sys
from collections.abc import Callable, Mapping
from typing import Protocol

from megarl.process.signals import asked_to_stop
from megarl.run.checkpoints import Checkpoints
from megarl.run.opening import RunSetup
from megarl.run.timeline import Timeline
from megarl.tracking import MetricValue
from megarl.tracking.clock import Clock

_UNMEASURED = (
    "megarl: with checkpoint.every=0 the first checkpoint is that at the end of the job's time, for which a quarter of"
    " the longest step and a minute are kept free: set it above 0, so that the run measures how long a checkpoint takes"
)


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
        if stop.is_limited and not settings.every:
            print(_UNMEASURED, file=sys.stderr, flush=True)
        is_last = run.is_over
        while not is_last:
            with run.timeline.record(run.step + 1):
                metrics = take_step()
            # Logged, then saved: a resumed run cuts off lines that are too many, but cannot write one that is missing.
            if metrics is not None:
                run.log(metrics)
            stop.end_step()
            with clock.stage("checkpoint"):
                run.checkpoints.complete_if_written()
                is_due = settings.every and run.step % settings.every == 0
                if is_due:
                    save()
                # Now that it is known what is still to be written beside another step.
                save_s, left_s = run.checkpoints.expected_seconds()
                is_last = run.is_over or stop.stops_before_next_step(save_s, left_s)
                if is_last and not is_due:
                    save()
        run.checkpoints.complete()
