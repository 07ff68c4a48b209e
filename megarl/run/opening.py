"""Opening of a run, the same for all commands: checks before any process starts, then the processes."""

import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray

from converters.gc_pause import gc_frozen
from converters.number_formats import number_format
from megarl.cluster.colocation import GpuSharing, OwnGpus, SharedGpus
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.placement.placement import table
from megarl.cluster.placement.reservation import Seats, reserve
from megarl.cluster.placement.roles import ENGINE, POLICY, engine_role, trainer_role
from megarl.cluster.ray.runtime import ray_cluster
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.config.commands import COMMAND_FACTS
from megarl.config.lora import without_dropout
from megarl.config.megatron import megatron_options
from megarl.data import PromptSampler
from megarl.models.auxiliary import trained_auxiliary
from megarl.models.ends import name_ends
from megarl.models.policy import Model, check_ends, check_held, check_name, check_trainable, read_model
from megarl.output.export import check_that_none_is_lost, step_of_export, write_export
from megarl.output.places import ADAPTER, EXPORT, LOGS
from megarl.process.file_system import lost_in_export
from megarl.process.phase import phase
from megarl.refit.choice import check_buckets
from megarl.rollout import engine_configuration
from megarl.rollout.adapter_slot import with_adapter_slot
from megarl.run.batches import BatchStream, StepBatch, read_waiting
from megarl.run.changed_settings import CONFIG_STATE, MODEL_STATE, changed_settings, model_settings
from megarl.run.checkpoints import Checkpoint, check_models, check_trained_alike, latest_checkpoint
from megarl.run.initial_weights import INITIAL_WEIGHTS_STATE, InitialWeights, check_began_alike, read_initial_weights
from megarl.run.throughput import Throughput
from megarl.schema import MegarlConfig
from megarl.tracking import Run, Tracker, open_tracker
from megatron_ext.memory.device_memory import CountedMemory
from megatron_ext.options.options import MegatronOptions


@dataclass(frozen=True)
class RunSetup:
    """State that a training run starts or resumes from, checked before any process starts.

    Example: RunSetup.read(config, "sft") reads config.model and the last checkpoint below config.output_dir.
    """

    config: MegarlConfig
    command: str
    model: Model
    options: MegatronOptions
    checkpoint: Checkpoint | None = None
    initial_weights: Mapping[str, InitialWeights] = field(default_factory=dict)
    learned_ends: tuple[int, ...] = ()
    """Tokens that the policy learns to end turns with and that the model's files do not name as end tokens."""

    @classmethod
    def read(cls, config: MegarlConfig, command: str) -> "RunSetup":
        """Read and check the model and the last checkpoint.

        Raises UserError for a model or a layout that cannot be trained, a checkpoint that does not fit, and an existing
        export that a new run would overwrite.
        """
        with phase("checking the model"):
            check_name(config.model)
            model = read_model(config.model, config.rollout.stop_token_ids)
            options = megatron_options(config)
            check_trainable(model, options, config.algorithm)
            if COMMAND_FACTS[command].refits_engines:
                _check_refits(model, options, config)
            checkpoint = latest_checkpoint(config, command)
            setup = cls(config, command, model, options, checkpoint, read_initial_weights(config, command, model))
            if checkpoint is not None:
                check_trained_alike(checkpoint.folder, model.architecture, options.adapter)
                check_models(checkpoint.folder, setup._trained_beside)
                check_began_alike(checkpoint, setup.initial_weights)
        if checkpoint is None:
            check_that_none_is_lost(setup.exports)
        elif changed := changed_settings(checkpoint, config, model.architecture):
            told = f"settings that have changed since the checkpoint of step {setup.step}: {', '.join(changed)}"
            print(told, file=sys.stderr, flush=True)
        return setup

    @classmethod
    def unfinished(cls, config: MegarlConfig, command: str) -> "RunSetup | None":
        """As `read`, but prints why and returns None if nothing is left to do."""
        setup = cls.read(config, command)
        if not setup.is_finished:
            return setup
        setup._print_finished()
        return None

    @property
    def exports(self) -> list[Path]:
        """Folders of the exported models, the policy's first."""
        adapter = [ADAPTER] if self.options.adapter else []
        return [Path(self.config.output_dir) / name for name in (EXPORT, *adapter, *self._trained_beside)]

    @property
    def _trained_beside(self) -> list[str]:
        return trained_auxiliary(self.config) if COMMAND_FACTS[self.command].trains_auxiliary else []

    def export_policy(self, trainer: TrainerGroup, step: int) -> None:
        """Write the policy after `step` as a HuggingFace folder, and its adapter if it has one."""
        output = Path(self.config.output_dir)
        write_export(partial(self._write_policy, trainer), output / EXPORT, step)
        if self.options.adapter:
            write_export(trainer.export_adapter, output / ADAPTER, step)

    def _write_policy(self, trainer: TrainerGroup, folder: Path) -> None:
        trainer.export(folder, copy_from=self.model.folder)
        if self.learned_ends:
            name_ends(folder, self.learned_ends)

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def steps(self) -> int:
        """Total number of steps of the run."""
        return COMMAND_FACTS[self.command].steps(self.config)

    @property
    def state(self) -> dict[str, Any]:
        """The part of a checkpoint's state that identifies the run."""
        digests = {role: each.digest for role, each in self.initial_weights.items()}
        return {
            INITIAL_WEIGHTS_STATE: digests,
            CONFIG_STATE: asdict(self.config),
            MODEL_STATE: model_settings(self.model.architecture),
        }

    @property
    def has_converged(self) -> bool:
        """Whether the run stopped early because it converged."""
        return bool(self.checkpoint and self.checkpoint.state.get("has_converged"))

    @property
    def is_finished(self) -> bool:
        """Whether no step is left to take and no model left to export."""
        is_over = self.step >= self.steps or self.has_converged
        return is_over and all(step_of_export(export) == self.step for export in self.exports)

    def _print_finished(self) -> None:
        """Say why nothing is left to do."""
        if self.has_converged:
            print(f"converged after {self.step} steps; choose another output_dir to start a new run", flush=True)
        else:
            key = COMMAND_FACTS[self.command].steps_key
            print(f"all {self.step} steps are done; raise {key} to go on from the last one", flush=True)

    def sampler(self, size: int, digest: str) -> PromptSampler:
        """Sampler of `size` examples at the position of the run.

        `digest` identifies the examples by their tokens. Raises UserError if the checkpoint drew from other examples.
        """
        sampler = PromptSampler(size, self.config.data.shuffle, self.config.loop.seed, digest)
        if self.checkpoint is not None:
            sampler.load_state_dict(self.checkpoint.state["sampler"])
        return sampler

    def batches(self, sampler: PromptSampler, make: Callable[[PromptSampler, int], Iterable[StepBatch]]) -> BatchStream:
        """Stream of the batches of `make`, after the checkpoint's batches that were not trained on."""
        if self.checkpoint is None:
            return BatchStream(sampler, make)
        return BatchStream(sampler, make, read_waiting(self.checkpoint.folder, self.checkpoint.state))


def _check_refits(model: Model, options: MegatronOptions, config: MegarlConfig) -> None:
    """Raise UserError if engines cannot sample from the model or hold it, or a bucket is too small for a tensor."""
    check_ends(model)
    check_held(model, config.rollout)
    if options.adapter is not None and not options.adapter.merge:
        with_adapter_slot(config.rollout, model.architecture, options.adapter.lora)
    elif config.cluster.address is None:
        held_in = number_format(config.rollout.weights)
        check_buckets(model.architecture, options.params_dtype, held_in, config.refit)


class Processes:
    """Starts the processes of a run in their reserved seats; they end with the run, in reverse order."""

    def __init__(self, config: MegarlConfig, seats: Mapping[str, Seats], stack: ExitStack) -> None:
        self._config, self._seats, self._stack = config, seats, stack
        self._logs = Path(config.output_dir) / LOGS

    def tracker(self, setup: RunSetup) -> Tracker:
        """Open loggers that continue after the finished steps."""
        return self._stack.enter_context(open_tracker_of(self._config, step=setup.step, last_step=setup.steps))

    def trainer(self, options: MegatronOptions, name: str = POLICY) -> TrainerGroup:
        """Ranks of the model `name`, placed but not started."""
        max_tokens = self._config.loop.max_tokens_per_micro_batch
        return self._stack.enter_context(
            TrainerGroup(options, self._config.cluster, self._seats[name], self._logs, max_tokens)
        )

    def engines(self) -> EngineGroup:
        """Engines, placed but without a model."""
        cluster = self._config.cluster
        return self._stack.enter_context(
            EngineGroup(
                engine_configuration(self._config),
                self._seats[ENGINE],
                self._logs,
                restarts=cluster.max_engine_restarts,
                start_within_s=cluster.engine_start_timeout_s,
            )
        )

    def throughput(self, trainer: TrainerGroup, *, computing: Sequence[str], waiting: Sequence[str] = ()) -> Throughput:
        """Metrics of how well steps use the GPUs of the run and the ranks of `trainer`: see `Throughput`."""
        shared = {gpu for seats in self._seats.values() for gpu in _shared_gpus(seats)}
        own = sum(seats.role.gpus * len(seats) for seats in self._seats.values() if seats.shared_gpus is None)
        gpus, peak_tflops = int(own) + len(shared), self._config.tracking.peak_tflops
        return Throughput(trainer, computing, gpus, peak_tflops, waiting)

    def gpus(self, engines: EngineGroup) -> GpuSharing:
        """Time-sharing of GPUs between `engines` and the models on the same ones, or none if they have their own."""
        cluster, memory = self._config.cluster, None
        if not cluster.sharing():
            return OwnGpus()
        if not self._seats[ENGINE].role.gpus:
            folder = Path(ray.get_runtime_context().get_temp_dir())
            memory = CountedMemory(folder / f"device_{secrets.token_hex(8)}", cluster.device_memory_bytes)
        return SharedGpus(engines, cluster.sharing(), memory)

    def engines_with(self, model: Model) -> EngineGroup:
        """Start engines that load and serve the HuggingFace folder of `model`."""
        engines = self.engines()
        engines.wait_started(engines.begin_start(model.folder, load_weights=True))
        return engines


@contextmanager
def open_processes(
    config: MegarlConfig, models: Mapping[str, MegatronOptions], *, engines: bool
) -> Iterator[Processes]:
    """Connect to the Ray cluster of a run, or start one, and reserve seats for its processes; all end with the context.

    Reserves seats for the ranks of all `models` and, with `engines`, for the engines, and prints the placement to
    standard error. Raises UserError, before anything starts, if there is no room for all.
    """
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(config.cluster))
        roles = [
            trainer_role(
                name,
                options.parallel,
                config.cluster,
                is_deterministic=options.is_deterministic,
                steps_on_host=options.steps_on_host,
            )
            for name, options in models.items()
        ]
        if engines:
            roles.append(engine_role(config.cluster, engine_configuration(config)))
        seats = stack.enter_context(reserve(roles, config.cluster))
        for line in table({name: each.nodes for name, each in seats.items()}, config.cluster.sharing()):
            print(line, file=sys.stderr, flush=True)
        if sentence := without_dropout(config.lora):
            print(f"warning: {sentence}", file=sys.stderr, flush=True)
        machines = len({node.id for name in models for node in seats[name].nodes})
        if sentence := lost_in_export(Path(config.output_dir), machines):
            print(f"warning: {sentence}, when the run is done", file=sys.stderr, flush=True)
        # Garbage collection over everything loaded by now would take 0.3 CPU s of a step of 4,096 responses.
        stack.enter_context(gc_frozen())
        yield Processes(config, seats, stack)


def _shared_gpus(seats: Seats) -> list[tuple[str, str]]:
    """Machine and number of each GPU that these seats share with others."""
    shared = zip(seats.nodes, seats.shared_gpus or [], strict=False)
    return [(node.id, gpu) for node, gpus in shared for gpu in gpus]


def open_tracker_of(config: MegarlConfig, *, step: int, last_step: int) -> Tracker:
    """Open the loggers of a run that has finished `step` of `last_step` steps."""
    run = Run(
        output_dir=Path(config.output_dir),
        first_step=step + 1 if step else 0,
        last_step=last_step,
        project=config.tracking.project,
        run_name=config.tracking.run_name,
        resumed=step > 0,
        config=asdict(config),
    )
    return open_tracker(config.tracking.loggers, run)
