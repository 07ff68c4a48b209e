"""The checkpoints of a run: found before it starts, written as it goes, in one shape for every command that trains."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.errors import UserError
from megarl.cluster.trainer_group import TrainerGroup
from megarl.output.places import CHECKPOINTS
from megarl.schema import MegarlConfig
from megatron_ext import checkpoint_folder


@dataclass(frozen=True)
class Checkpoint:
    """A complete one: the ranks read the `folder`, the controller the `state`."""

    folder: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self.state["step"]


def checkpoints_folder(config: MegarlConfig) -> Path:
    """Where the checkpoints of a run are."""
    return Path(config.output_dir) / CHECKPOINTS


def latest_checkpoint(config: MegarlConfig, command: str) -> Checkpoint | None:
    """Checkpoint that a run of `megarl COMMAND` continues from; None for a new run.

    Raises UserError if it may not continue from one, or if another command wrote it.
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
    # Only `train` wrote them when they did not say.
    if (writer := state.get("command", "train")) != command:
        raise UserError(
            f"{folder} is a checkpoint of megarl {writer}, from which megarl {command} cannot go on: choose "
            "another output_dir"
        )
    return Checkpoint(folder, state)


class CheckpointWriter:
    """A checkpoint that is being made of the state after `step`; a context manager that completes it, or takes it away.

    `save` writes the state of the models; further files of the controller go to `folder`, the rest of its state into
    `state`.
    """

    def __init__(self, config: MegarlConfig, command: str, step: int) -> None:
        self._root, self._step, self._keep = checkpoints_folder(config), step, config.checkpoint.keep
        self.state: dict[str, Any] = {"command": command, "step": step}

    def __enter__(self) -> "CheckpointWriter":
        self.folder = checkpoint_folder.begin(self._root, self._step)
        return self

    def save(self, model: TrainerGroup, name: str = "") -> None:
        """Let the ranks of a model write it; an auxiliary one by its name."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        model.save(folder)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            checkpoint_folder.abandon(self._root, self._step)
            return
        checkpoint_folder.commit(self._root, self._step, self.state, keep=self._keep)
