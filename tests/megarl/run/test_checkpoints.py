"""Checkpoints that cannot be written: whether somebody has to change something, or the disk is away for a while."""

import errno
import os
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.cluster.workers.worker import WorkerFailed
from megarl.run.checkpoints import CheckpointFailed, Checkpoints, checkpoints_folder
from megarl.run.resumption import run_with_restarts
from megarl.schema import MegarlConfig
from megatron_ext.checkpoint import checkpoint_folder


@pytest.fixture
def config(tmp_path: Path) -> MegarlConfig:
    made = MegarlConfig()
    made.output_dir = str(tmp_path / "run")
    return made


def failing(number: int):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def save(config: MegarlConfig, step: int) -> None:
    with Checkpoints(config, "train", {}) as checkpoints:
        checkpoints.save(step, lambda _folder: {})


def test_a_run_whose_disk_is_away_goes_on_from_the_last_checkpoint(config, monkeypatch, capsys):
    save(config, 1)
    renames = iter([failing(errno.ESTALE), checkpoint_folder.rename, checkpoint_folder.rename])
    monkeypatch.setattr(checkpoint_folder, "rename", lambda *paths: next(renames)(*paths))
    run_with_restarts(lambda config: save(config, 2), config)
    root = checkpoints_folder(config)
    assert checkpoint_folder.complete_iterations(root) == [1, 2]
    said = f"cannot write a checkpoint below {root}: Stale file handle; the run goes on from the checkpoint of step 1"
    assert said in capsys.readouterr().err


def test_a_batch_script_sees_that_there_is_a_new_one(config, tmp_path, monkeypatch):
    progress = tmp_path / "7.progress"
    save(config, 1)
    monkeypatch.setenv("MEGARL_PROGRESS_FILE", str(progress))
    monkeypatch.setattr(checkpoint_folder, "rename", failing(errno.ESTALE))
    with pytest.raises(CheckpointFailed):
        save(config, 2)
    assert not progress.exists()
    monkeypatch.undo()
    monkeypatch.setenv("MEGARL_PROGRESS_FILE", str(progress))
    save(config, 2)
    assert progress.exists()


class Rank:
    """A group of ranks of which one cannot write its part."""

    def __init__(self, log: Path, number: int) -> None:
        self._failure = checkpoint_folder.disk_error(OSError(number, os.strerror(number)), Path("/runs/checkpoints"))
        self._log = log

    def begin_save(self, _folder: Path, *, in_background: bool) -> None:
        """Nothing is written here."""

    def finish_save(self) -> None:
        if isinstance(self._failure, UserError):
            raise self._failure
        raise WorkerFailed(f"DiskUnavailable: {self._failure}", self._log, self._failure)


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.EIO, CheckpointFailed, "below /runs/checkpoints: Input/output error: see to the file system; the same"),
        (errno.ENOSPC, UserError, "below /runs/checkpoints: No space left on device; free space or choose another"),
        (errno.EACCES, UserError, "below /runs/checkpoints: Permission denied; free space or choose another"),
    ],
)
def test_what_a_rank_cannot_write_asks_for_somebody_only_where_something_is_to_be_changed(
    config, tmp_path, number, kind, says
):
    checkpoints = Checkpoints(config, "train", {"": Rank(tmp_path / "trainer_3.log", number)})  # type: ignore[dict-item]
    with pytest.raises(kind) as raised, checkpoints:
        checkpoints.save(1, lambda _folder: {})
    assert says in raised.value.sentence
    assert list(checkpoints_folder(config).iterdir()) == []


def test_what_the_controller_itself_saves_is_told_alike(config):
    def state(folder: Path) -> dict[str, object]:
        failing(errno.ETIMEDOUT)()
        return {}

    with pytest.raises(CheckpointFailed, match="Connection timed out"), Checkpoints(config, "train", {}) as checkpoints:
        checkpoints.save(1, state)
