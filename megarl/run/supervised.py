"""Training on examples that are there before the step: what fine-tuning and training on preferences share."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms import AGGREGATIONS
from megarl.cluster.runtime import ray_cluster
from megarl.cluster.trainer_group import TrainerGroup
from megarl.config.megatron import megatron_options
from megarl.data import Conversation, PromptSampler
from megarl.models.policy import Model, check_layout, read_model
from megarl.output.export import check_that_none_is_lost, step_of_export, write_export
from megarl.output.places import EXPORT, LOGS
from megarl.process.phase import phase
from megarl.process.signals import asked_to_stop
from megarl.run.checkpoints import Checkpoint, CheckpointWriter, latest_checkpoint
from megarl.run.draws import Draw, Draws, read_waiting
from megarl.run.job import open_tracker_of
from megarl.schema import MegarlConfig
from megarl.stages.update import update
from megarl.tracking import MetricValue, Tracker
from megarl.tracking.clock import Clock
from megarl.tracking.histogram import numbers
from megatron_ext.objective import Objective
from megatron_ext.options import MegatronOptions
from megatron_ext.packing import RaggedBatch


@dataclass(frozen=True)
class HeldOut:
    """Measurement every so many steps, and after the last; and when to stop early."""

    measure: Callable[[], dict[str, float]]
    every: int
    is_enough: Callable[[Mapping[str, float]], bool] = lambda _metrics: False


@dataclass(frozen=True)
class Start:
    """State that a run begins with, or continues with, checked before any process starts."""

    config: MegarlConfig
    command: str
    model: Model
    options: MegatronOptions
    checkpoint: Checkpoint | None = None

    @classmethod
    def of(cls, config: MegarlConfig, command: str) -> "Start":
        """Raises UserError for a model or a layout that cannot be trained, and where an export is in the way."""
        with phase("checking the model"):
            model = read_model(config.model, config.rollout.stop_token_ids)
            options = megatron_options(config)
            check_layout(model.architecture, options)
            checkpoint = latest_checkpoint(config, command)
        start = cls(config, command, model, options, checkpoint)
        if checkpoint is None:
            check_that_none_is_lost([start.export])
        return start

    @property
    def export(self) -> Path:
        """Where the trained model goes."""
        return Path(self.config.output_dir) / EXPORT

    @property
    def has_learned_enough(self) -> bool:
        """Whether the run has ended before its last step."""
        return bool(self.checkpoint and self.checkpoint.state["is_enough"])

    def is_finished(self, steps: int) -> bool:
        """Whether nothing is left to do of a run of so many steps; then that is said."""
        if not (self.step >= steps or self.has_learned_enough) or step_of_export(self.export) != self.step:
            return False
        if self.has_learned_enough:
            print(f"all is learned after {self.step} steps; choose another output_dir to begin anew", flush=True)
        else:
            print(f"all {self.step} steps are done; give more of them to go on from the last one", flush=True)
        return True

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self.checkpoint.step if self.checkpoint else 0

    def sampler(self, size: int) -> PromptSampler:
        """Sampler of `size` examples, where the run stands. Raises UserError if the run drew from other examples."""
        sampler = PromptSampler(size, self.config.data.shuffle, self.config.loop.seed)
        if self.checkpoint is not None:
            sampler.load_state_dict(self.checkpoint.state["draws"]["sampler"])
        return sampler

    def draws(self, sampler: PromptSampler, make: Callable[[PromptSampler, int], Iterable[Draw]]) -> Draws:
        """Draws of `make`, after those drawn before and not trained on."""
        if self.checkpoint is None:
            return Draws(sampler, make)
        return Draws(sampler, make, read_waiting(self.checkpoint.folder, self.checkpoint.state["draws"]))


@dataclass
class Position:
    """Where a run stands: steps that are done, and whether it has learned all there is, however many there could be."""

    step: int
    is_enough: bool


@dataclass(frozen=True)
class Training:
    """The ranks and the loggers of a run of `steps` optimizer steps."""

    start: Start
    trainer: TrainerGroup
    tracker: Tracker
    steps: int
    position: Position
    clock: Clock = field(default_factory=Clock)

    def build(self, *, reference: bool = False, **options: Any) -> None:
        """Start the ranks and read the weights; the `options` are those of `TrainerGroup.build`."""
        model = self.start.model
        with phase("starting the trainer"):
            self.trainer.start()
            self.trainer.build(model.folder, model.megatron_checkpoint, self.steps, reference=reference, **options)

    def resume(self) -> None:
        """Let the ranks continue from the checkpoint, where there is one; the reference stays what was built."""
        if self.start.checkpoint is not None:
            self.trainer.load(self.start.checkpoint.folder)

    def learn(self, draws: Draws, objective: Objective, held_out: HeldOut | None) -> None:
        """One optimizer step per draw, until there are `steps`, no more draws, or it is enough."""
        checkpoints, position = self.start.config.checkpoint, self.position
        self.clock.end_step(tokens=0)  # the time of the start is no step's
        with asked_to_stop(waits=checkpoints.on_signal) as stop:
            while position.step < self.steps and not position.is_enough:
                if (draw := draws.after(position.step)) is None:
                    position.is_enough = True
                else:
                    metrics = self._step(draw, objective, held_out)
                    # Logged, then saved: a resumed run cuts off lines that are too many.
                    self.tracker.log(position.step, metrics)
                    position.is_enough = bool(held_out and held_out.is_enough(numbers(metrics)))
                is_last = bool(stop) or position.is_enough or position.step == self.steps
                if is_last or (checkpoints.every and position.step % checkpoints.every == 0):
                    with self.clock.stage("checkpoint"):
                        self._save(draws)
                if is_last:
                    break

    def _step(self, draw: Draw, objective: Objective, held_out: HeldOut | None) -> dict[str, MetricValue]:
        step = self.position.step = self.position.step + 1
        with self.clock.stage("update"):
            metrics = {**update(self.trainer, [draw.batch], objective, temperature=1.0), **draw.metrics}
        if held_out and (step % held_out.every == 0 or step == self.steps):
            with self.clock.stage("evaluate"):
                metrics |= held_out.measure()
        return metrics | self.clock.end_step(tokens=len(draw.batch.tokens))

    def _save(self, draws: Draws) -> None:
        with CheckpointWriter(self.start.config, self.start.command, self.position.step) as checkpoint:
            checkpoint.save(self.trainer)
            checkpoint.state |= {"is_enough": self.position.is_enough, "draws": draws.save(checkpoint.folder)}

    def export(self) -> None:
        """Write the trained model as a HuggingFace folder below `output_dir`."""
        with phase("writing the trained model"):
            write = partial(self.trainer.export, copy_from=self.start.model.folder)
            write_export(write, self.start.export, self.position.step)


@contextmanager
def open_training(start: Start, steps: int) -> Iterator[Training]:
    """The processes of a run, placed but without a model: see `Training.build`. They end with the context."""
    config = start.config
    logs = Path(config.output_dir) / LOGS
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(config.cluster))
        tracker = stack.enter_context(open_tracker_of(config, step=start.step, last_step=steps))
        max_tokens = config.loop.max_tokens_per_micro_batch
        trainer = stack.enter_context(TrainerGroup(start.options, config.cluster, logs, max_tokens))
        yield Training(start, trainer, tracker, steps, Position(start.step, start.has_learned_enough))


def conversation_batch(conversations: Sequence[Conversation], aggregation: str, unit: int = 1) -> RaggedBatch:
    """Conversations end to end; the field `weights` is that of an `aggregation` of what the assistant says."""
    mask = torch.tensor([said for conversation in conversations for said in conversation.mask])
    lengths = torch.tensor([sum(conversation.mask) for conversation in conversations])
    return RaggedBatch(
        tokens=torch.tensor([token for conversation in conversations for token in conversation.token_ids]),
        lengths=torch.tensor([len(conversation.token_ids) for conversation in conversations]),
        fields={"weights": torch.zeros(len(mask)).masked_scatter(mask, AGGREGATIONS[aggregation](lengths))},
        unit=unit,
    )
