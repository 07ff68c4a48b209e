"""The checkpoints of a run: found before it starts, written as it goes, in one format for all commands that train."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from converters.architectures import Architecture, Lora, adapter_architecture
from converters.errors import UserError
from converters.formats.peft import ADAPTER_CONFIG, read_adapter_config
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.cluster.workers.worker import WorkerFailed
from megarl.output.places import CHECKPOINTS
from megarl.process.errors import RunFailed
from megarl.process.progress_file import note_progress
from megarl.run.checkpoint_files import CheckpointFiles, WriteFile
from megarl.schema import MegarlConfig
from megatron_ext.checkpoint import checkpoint_folder
from megatron_ext.options.options import AdapterOptions


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the ranks read `folder`, the controller reads `state`."""

    folder: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.state["step"]


def checkpoints_folder(config: MegarlConfig) -> Path:
    """Folder of a run's checkpoints."""
    return Path(config.output_dir) / CHECKPOINTS


def latest_checkpoint(config: MegarlConfig, command: str) -> Checkpoint | None:
    """Find the checkpoint that a run of `megarl COMMAND` resumes from; None for a new run.

    Raises UserError if there is one and `checkpoint.resume` is never, or if another command wrote it.
    """
    root = checkpoints_folder(config)
    iterations = checkpoint_folder.complete_iterations(root)
    if not iterations:
        return None
    if config.checkpoint.resume == "never":
        raise UserError(
            f"{root} holds checkpoints up to step {iterations[-1]}, which checkpoint.resume=never would mix with those "
            "of a new run: choose another output_dir, remove the folder, or continue with checkpoint.resume=auto"
        )
    folder = checkpoint_folder.iteration_folder(root, iterations[-1])
    state = checkpoint_folder.read_controller_state(folder)
    if (writer := state["command"]) != command:
        raise UserError(
            f"{folder} is a checkpoint of megarl {writer}, from which megarl {command} cannot go on: choose "
            "another output_dir"
        )
    return Checkpoint(folder, _as_written_now(state))


def _as_written_now(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a state to the current keys: megarl sft, dpo, reward-model and spin used to write others."""
    if "batches" not in state:
        return state
    return {**state, **state["batches"], "has_converged": state["is_enough"]}


def check_models(folder: Path, trained: Iterable[str]) -> None:
    """Raise UserError unless the checkpoint holds each of these models that a run trains beside its policy."""
    if missing := [name for name in trained if not (folder / name).is_dir()]:
        raise UserError(
            f"{folder} holds no {missing[0]}, since the run that wrote it trained none: set algorithm.advantage as it"
            " was, or begin a new run with the weights (model.megatron_checkpoint)"
        )


def check_trained_alike(folder: Path, architecture: Architecture, adapter: AdapterOptions | None) -> None:
    """Raise UserError unless the checkpoint holds what this run trains: the same adapter, or whole weights.

    `architecture` is that of the model, `adapter` the adapter to train, or None to train the weights.
    """
    held = read_adapter_config(folder) if (folder / ADAPTER_CONFIG).exists() else None
    if held is None and adapter is None:
        return
    if held is None or adapter is None:
        kinds = ("the weights", "an adapter") if held is None else ("an adapter", "the weights")
        raise UserError(
            f"{folder} holds {kinds[0]} that a run trained, and this one trains {kinds[1]}: set lora.rank as it was,"
            " or choose another output_dir"
        )
    if (held.rank, held.alpha) != (adapter.lora.rank, adapter.lora.alpha):
        raise UserError(
            f"{folder} holds an adapter of rank {held.rank} and alpha {held.alpha:g}, and this run trains one of rank"
            f" {adapter.lora.rank} and alpha {adapter.lora.alpha:g}: set lora.rank and lora.alpha as they were, or"
            " choose another output_dir"
        )
    if _factors(architecture, held) != _factors(architecture, adapter.lora):
        raise UserError(
            f"{folder} holds an adapter of {', '.join(held.target_modules)}, and this run trains one of"
            f" {', '.join(adapter.lora.target_modules)}: set lora.target_modules and model.path as they were, or choose"
            " another output_dir"
        )


def _factors(architecture: Architecture, lora: Lora) -> Set[str]:
    """Names of an adapter's tensors in the model; empty if the adapter does not fit it."""
    try:
        return adapter_architecture(architecture, lora).hf_shapes.keys()
    except UserError:
        return set()


class CheckpointFailed(RunFailed):
    """A checkpoint could not be written because a disk does not answer, here or on the machine of a rank."""

    details = ""

    def __init__(self, reason: object) -> None:
        super().__init__(str(reason))
        self.happened = str(reason)
        self.sentence = f"{reason}: see to the file system; the same command continues from the last checkpoint"


@dataclass
class _Pending:
    """A checkpoint in the making: its step, the controller's files and state."""

    step: int
    files: CheckpointFiles
    state: Mapping[str, Any] = field(default_factory=dict)


class Checkpoints:
    """Writes the checkpoints of a run, one at a time; with `checkpoint.async_save` the run goes on meanwhile.

    A checkpoint holds the state of the moment when it was begun. A run can resume from it once every rank has written
    its part and `complete` has run. `models` are the trained models by name; the policy's name is "".

    A context manager: on exit, completes the last checkpoint, or removes it if the run failed.
    """

    def __init__(self, config: MegarlConfig, command: str, models: Mapping[str, TrainerGroup]) -> None:
        self._root, self._config = checkpoints_folder(config), config.checkpoint
        self._command, self._models = command, models
        self._pending: _Pending | None = None
        self._waited_s = 0.0
        self._begun_at_s = self._begin_took_s = self._longest_s = 0.0

    def save(self, step: int, state_in: Callable[[WriteFile], Mapping[str, Any]]) -> None:
        """Begin a checkpoint after `step`, once the one before is complete; without `async_save`, complete it, too.

        `state_in(write)` returns the controller's state, and passes its files to `write`, which queues them to be
        written while the ranks write theirs. Raises UserError if the disk is full, CheckpointFailed if it does not
        answer.
        """
        started = time.perf_counter()
        self.complete()
        self._waited_s += time.perf_counter() - started
        files = CheckpointFiles(checkpoint_folder.partial_folder(self._root, step))
        self._pending, self._begun_at_s = _Pending(step, files), time.monotonic()
        with self._abandoned_on_error():
            folder = checkpoint_folder.begin(self._root, step)
            self._pending.state = copy.deepcopy({"command": self._command, "step": step, **state_in(files.write)})
            files.start()
            for name, model in self._models.items():
                (folder / name).mkdir(exist_ok=True)
                model.begin_save(folder / name, in_background=self._config.async_save)
            self._begin_took_s = time.monotonic() - self._begun_at_s
        if not self._config.async_save:
            self.complete()

    def complete_if_written(self) -> None:
        """Complete the last checkpoint if everything is written, without waiting. Raises as `save`."""
        if self._pending is None:
            return
        with self._abandoned_on_error():
            of_ranks = [model.save_is_written() for model in self._models.values()]
            written = [self._pending.files.is_written(), *of_ranks]
        if all(written):
            self.complete()

    def complete(self) -> None:
        """Wait until the last checkpoint is written, and make it the one to resume from. Raises as `save`."""
        if self._pending is None:
            return
        with self._abandoned_on_error():
            # The controller's files first: a full disk is reported without waiting for the ranks.
            own_writing_s = self._pending.files.wait()
            writing_s = max([own_writing_s, *(model.finish_save() for model in self._models.values())])
            written_s = time.monotonic()
            kept, known = (self._config.keep_last, self._config.keep_every), self._pending.files.written
            checkpoint_folder.commit(self._root, self._pending.step, self._pending.state, *kept, known)
        self._pending = None
        own_s = self._begin_took_s + time.monotonic() - written_s
        self._longest_s = max(self._longest_s, own_s + writing_s)
        note_progress()

    def expected_seconds(self) -> tuple[float, float]:
        """Seconds that the next checkpoint may take (the longest so far), and those left for the one being written.

        Counts the time of writing itself, not of the steps that run meanwhile.
        """
        gone_s = 0.0 if self._pending is None else time.monotonic() - self._begun_at_s
        longest_s = max(self._longest_s, gone_s)
        return longest_s, 0.0 if self._pending is None else longest_s - gone_s

    def take_metrics(self) -> dict[str, float]:
        """Seconds that saves waited for the checkpoint before, since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return {"seconds/checkpoint_wait": waited} if self._config.async_save else {}

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._abandon()
            reason = error.error if isinstance(error, WorkerFailed) else error
            if isinstance(reason, OSError):
                reason = checkpoint_folder.disk_error(reason, self._root)
                if isinstance(reason, UserError):
                    raise reason from error
            if isinstance(reason, checkpoint_folder.DiskUnavailableError):
                raise CheckpointFailed(reason) from error
            raise

    def _abandon(self) -> None:
        if self._pending is not None:
            # Otherwise its thread would go on writing into the folder, where the next run may write.
            self._pending.files.end()
            checkpoint_folder.abandon(self._root, self._pending.step)
            self._pending = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.complete()
        else:
            self._abandon()
