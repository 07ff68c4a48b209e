"""The step loop of all programs: logs every step, and saves a checkpoint when one is due."""

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
    """A run, as far as the step loop uses it."""

    @property
    def setup(self) -> RunSetup:
        """State that the run started from."""

    @property
    def timeline(self) -> Timeline:
        """Recorder of the step to profile."""

    @property
    def checkpoints(self) -> Checkpoints:
        """Writer of the checkpoints."""

    @property
    def step(self) -> int:
        """Number of finished steps."""

    @property
    def is_over(self) -> bool:
        """Whether no step is left to take."""

    def log(self, metrics: Mapping[str, MetricValue]) -> None:
        """Pass the metrics of the current step to all loggers."""


def run_steps(
    run: SteppedRun,
    clock: Clock,
    *,
    take_step: Callable[[], Mapping[str, MetricValue] | None],
    save: Callable[[], None],
) -> None:
    """Take steps until the run is over or asked to stop; save when a checkpoint is due, and after the last step.

    `take_step` returns the metrics of its step, or None if nothing was left to do, which must make the run be over.
    """
    settings = run.setup.config.checkpoint
    with asked_to_stop(waits=settings.on_signal) as stop:
        if stop.is_limited and not settings.every:
            print(_UNMEASURED, file=sys.stderr, flush=True)
        is_last = run.is_over
        while not is_last:
            with run.timeline.record(run.step + 1):
                metrics = take_step()
            # Log before saving: a resumed run can cut off surplus lines, but cannot write a missing one.
            if metrics is not None:
                run.log(metrics)
            stop.end_step()
            with clock.stage("checkpoint"):
                run.checkpoints.complete_if_written()
                is_due = settings.every and run.step % settings.every == 0
                if is_due:
                    save()
                # Only now is it known how much is left to write during another step.
                save_s, left_s = run.checkpoints.expected_seconds()
                is_last = run.is_over or stop.stops_before_next_step(save_s, left_s)
                if is_last and not is_due:
                    save()
        run.checkpoints.complete()
