"""Checkpoints that a run cannot go on from, or cannot write: whether somebody has to change something, and what."""

import errno
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from converters.architectures import Architecture, Lora, adapter_architecture, read_architecture
from converters.errors import UserError
from converters.formats.peft import write_adapter_config
from converters.formats.safetensors import read_json
from megarl.cluster.workers.worker import WorkerFailed
from megarl.config.folder import recipes_folder
from megarl.run.checkpoints import (
    CheckpointFailed,
    Checkpoints,
    check_trained_alike,
    checkpoints_folder,
    latest_checkpoint,
)
from megarl.run.resumption import run_with_restarts
from megarl.schema import MegarlConfig
from megatron_ext.checkpoint import checkpoint_folder
from megatron_ext.options.options import AdapterOptions


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


def test_a_checkpoint_with_the_keys_of_earlier_versions_is_gone_on_from(config: MegarlConfig) -> None:
    sampler, waiting = {"drawn": 3}, [2]
    with Checkpoints(config, "sft", {}) as checkpoints:
        checkpoints.save(1, lambda _: {"is_enough": True, "batches": {"sampler": sampler, "waiting": waiting}})
        now = {"has_converged": True, "sampler": sampler, "waiting": waiting}
        found = latest_checkpoint(config, "sft")
        assert found is not None
        assert {name: found.state[name] for name in now} == now
        checkpoints.save(2, lambda _: now)
    assert (found := latest_checkpoint(config, "sft")) is not None
    assert {name: found.state[name] for name in now} == now


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


def architecture_of(model: str) -> Architecture:
    return read_architecture(read_json(recipes_folder() / "models" / f"{model}.json"))


QUERIES = Lora(4, 8.0, ("q_proj", "v_proj"))
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("held", "model", "trained", "says"),
    [
        (Lora(4, 8.0), "qwen3_8b", Lora(4, 8.0, ALL), None),
        (QUERIES, "qwen3_8b", Lora(4, 8.0, ("v_proj", "q_proj")), None),
        (QUERIES, "qwen3_8b", replace(QUERIES, rank=2), "of rank 4 and alpha 8, and this run trains one of rank 2"),
        (QUERIES, "qwen3_8b", Lora(4, 8.0), r"of q_proj, v_proj, and .* of all-linear: set lora\.target_modules and"),
        (QUERIES, "deepseek_v3", Lora(4, 8.0), r"of q_proj, v_proj, and .* and model\.path as they were"),
        (QUERIES, "qwen3_8b", None, "an adapter that a run trained, and this one trains the weights: set lora"),
        (None, "qwen3_8b", QUERIES, "the weights that a run trained, and this one trains an adapter: set lora"),
    ],
)
def test_a_run_goes_on_with_the_adapter_that_it_has_trained(
    held: Lora | None, model: str, trained: Lora | None, says: str | None, tmp_path: Path
) -> None:
    if held is not None:
        write_adapter_config(tmp_path, adapter_architecture(architecture_of("qwen3_8b"), held), held)
    with nullcontext() if says is None else pytest.raises(UserError, match=says):
        check_trained_alike(tmp_path, architecture_of(model), trained and AdapterOptions(trained))


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
        raise WorkerFailed(f"DiskUnavailableError: {self._failure}", self._log, self._failure)


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
