"""Training on given examples: the part that fine-tuning and training on preferences share."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from converters.architectures import Head
from megarl.algorithms import AnyObjective
from megarl.cluster.placement.roles import POLICY
from megarl.cluster.trainer.batch import Batch
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.process.phase import phase
from megarl.run.batches import BatchStream
from megarl.run.checkpoints import Checkpoints
from megarl.run.opening import Processes, RunSetup, open_processes
from megarl.run.steps import run_steps
from megarl.run.throughput import Throughput
from megarl.run.timeline import Timeline, recorded_ranks
from megarl.stages.update import update
from megarl.tracking import MetricValue, Tracker
from megarl.tracking.clock import Clock
from megarl.tracking.histogram import numbers


@dataclass(frozen=True)
class Measurement:
    """An evaluation every `every` steps and after the last; `has_converged` decides from metrics to stop early."""

    measure: Callable[[], dict[str, float]]
    every: int
    has_converged: Callable[[Mapping[str, float]], bool] = lambda _metrics: False


@dataclass
class Position:
    """Position of a run: its finished steps, and whether it has converged before the last one."""

    step: int
    has_converged: bool


@dataclass(frozen=True)
class Training:
    """A supervised run: its ranks, loggers and position."""

    setup: RunSetup
    processes: Processes
    trainer: TrainerGroup
    tracker: Tracker
    position: Position
    throughput: Throughput
    timeline: Timeline
    checkpoints: Checkpoints
    clock: Clock = field(default_factory=Clock)

    def build(self, *, reference: bool = False, head: Head = "language_model") -> None:
        """Start the ranks and load the initial weights; see `TrainerGroup.build`."""
        model = self.setup.model
        with phase("starting the trainer"):
            self.trainer.start()
            self.trainer.build(
                model.folder, model.megatron_checkpoint, self.setup.steps, reference=reference, head=head
            )

    def resume(self) -> None:
        """Load the checkpoint, if there is one, into the ranks; the reference stays as built."""
        if self.setup.checkpoint is not None:
            self.trainer.load(self.setup.checkpoint.folder)

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.position.step

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or the run has converged."""
        return self.position.has_converged or self.position.step >= self.setup.steps

    def log(self, metrics: Mapping[str, MetricValue]) -> None:
        """Pass the metrics of the current step to all loggers."""
        self.tracker.log(self.position.step, metrics)

    def learn(self, batches: BatchStream, objective: AnyObjective, measurement: Measurement | None) -> None:
        """Take one optimizer step per batch, until all steps are done, batches run out, or the run has converged."""
        # The start belongs to no step, nor does what it computed of held-out examples.
        self.clock.end_step(tokens=0)
        self.throughput.begin_steps()
        take_step = partial(self._take_step, batches, objective, measurement)
        run_steps(self, self.clock, take_step=take_step, save=partial(self._save, batches))

    def _take_step(
        self, batches: BatchStream, objective: AnyObjective, measurement: Measurement | None
    ) -> dict[str, MetricValue] | None:
        position = self.position
        if (drawn := batches.after(position.step)) is None:
            position.has_converged = True
            return None
        position.step += 1
        with self.clock.stage("update"):
            batch = Batch.of(drawn.batch)
            metrics = {**update(self.trainer, [batch], objective, temperature=1.0), **drawn.metrics}
        if measurement and (position.step % measurement.every == 0 or position.step == self.setup.steps):
            with self.clock.stage("evaluate"):
                metrics |= measurement.measure()
        position.has_converged = bool(measurement and measurement.has_converged(numbers(metrics)))
        metrics |= self.checkpoints.take_metrics()
        return metrics | self.throughput.end_step(self.clock.end_step(tokens=len(drawn.batch.tokens)))

    def _save(self, batches: BatchStream) -> None:
        position = self.position
        self.checkpoints.save(
            position.step,
            lambda write: {**self.setup.state, "has_converged": position.has_converged, **batches.save(write)},
        )

    def export(self) -> None:
        """Write the trained model as a HuggingFace folder below `output_dir`."""
        with phase("writing the trained model"):
            self.setup.export_policy(self.trainer, self.position.step)


@contextmanager
def open_training(setup: RunSetup, *, engines: bool = False) -> Iterator[Training]:
    """Open the processes of a run, placed but without a model (see `Training.build`); they end with the context.

    With `engines`, reserves seats for engines, too.
    """
    with open_processes(setup.config, {POLICY: setup.options}, engines=engines) as processes:
        tracker = processes.tracker(setup)
        trainer = processes.trainer(setup.options)
        position = Position(setup.step, setup.has_converged)
        throughput = processes.throughput(trainer, computing=("reference", "update", "evaluate"))
        timeline = Timeline(
            setup.config.tracking.profile, Path(setup.config.output_dir), recorded_ranks([trainer]), None, None
        )
        with Checkpoints(setup.config, setup.command, {"": trainer}) as checkpoints:
            yield Training(setup, processes, trainer, tracker, position, throughput, timeline, checkpoints)
