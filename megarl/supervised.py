"""Training on examples that are there before the step: what fine-tuning and training on preferences share."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from converters.errors import UserError
from megarl.algorithms import AGGREGATIONS
from megarl.clock import Clock
from megarl.cluster.runtime import ray_cluster
from megarl.cluster.trainer_group import TrainerGroup
from megarl.config.megatron import megatron_options
from megarl.config.schema import MegarlConfig
from megarl.data import Conversation
from megarl.job import open_tracker_of
from megarl.model import Model, check_layout, read_model
from megarl.output.places import EXPORT, LOGS
from megarl.phase import phase
from megarl.stages.update import update
from megarl.tracking import Tracker
from megarl.tracking.histogram import numbers
from megatron_ext.objective import Objective
from megatron_ext.options import MegatronOptions
from megatron_ext.packing import RaggedBatch


class Draw(NamedTuple):
    """The batch of one optimizer step, and what there is to say about how it was made."""

    batch: RaggedBatch
    metrics: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class HeldOut:
    """What is measured every so many steps, and after the last; and when that is enough."""

    measure: Callable[[], dict[str, float]]
    every: int
    is_enough: Callable[[Mapping[str, float]], bool] = lambda _metrics: False


@dataclass(frozen=True)
class Start:
    """What a run begins with, checked before any process starts."""

    config: MegarlConfig
    model: Model
    options: MegatronOptions

    @classmethod
    def of(cls, config: MegarlConfig) -> "Start":
        """Raises UserError for a model or a layout that cannot be trained, and where an export is in the way."""
        with phase("checking the model"):
            model = read_model(config.model, config.rollout.stop_token_ids)
            options = megatron_options(config)
            check_layout(model.architecture, options)
        export = Path(config.output_dir) / EXPORT
        if export.exists():
            raise UserError(f"{export} exists: remove it or choose another output_dir")
        return cls(config, model, options)


@dataclass(frozen=True)
class Training:
    """The ranks and the loggers of a run of `steps` optimizer steps."""

    start: Start
    trainer: TrainerGroup
    tracker: Tracker
    steps: int
    clock: Clock = field(default_factory=Clock)

    def build(self, *, reference: bool = False, **options: Any) -> None:
        """Start the ranks and read the weights; the `options` are those of `TrainerGroup.build`."""
        model = self.start.model
        with phase("starting the trainer"):
            self.trainer.start()
            self.trainer.build(model.folder, model.megatron_checkpoint, self.steps, reference=reference, **options)

    def learn(self, draws: Iterable[Draw], objective: Objective, held_out: HeldOut | None) -> None:
        """One optimizer step per draw, until there are `steps`, no more draws, or it is enough."""
        self.clock.end_step(tokens=0)  # what the start took is no step's
        for step, draw in enumerate(islice(draws, self.steps), 1):
            with self.clock.stage("update"):
                metrics = {**update(self.trainer, [draw.batch], objective, temperature=1.0), **draw.metrics}
            if held_out and (step % held_out.every == 0 or step == self.steps):
                with self.clock.stage("evaluate"):
                    metrics |= held_out.measure()
            self.tracker.log(step, metrics | self.clock.end_step(tokens=len(draw.batch.tokens)))
            if held_out and held_out.is_enough(numbers(metrics)):
                break

    def export(self) -> None:
        """Write the trained model as a HuggingFace folder below `output_dir`."""
        with phase("writing the trained model"):
            self.trainer.export(Path(self.start.config.output_dir) / EXPORT, self.start.model.folder)


@contextmanager
def open_training(start: Start, steps: int) -> Iterator[Training]:
    """The processes of a run, placed but without a model: see `Training.build`. They end with the context."""
    config = start.config
    logs = Path(config.output_dir) / LOGS
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(config.cluster))
        tracker = stack.enter_context(open_tracker_of(config, step=0, last_step=steps))
        max_tokens = config.loop.max_tokens_per_micro_batch
        trainer = stack.enter_context(TrainerGroup(start.options, config.cluster, logs, max_tokens))
        yield Training(start, trainer, tracker, steps)


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
