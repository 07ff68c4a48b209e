"""Checkpoints that a run cannot go on from, or cannot write: whether somebody has to change something, and what."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event, Timer

import pytest

from converters.architectures import Architecture, Lora, adapter_architecture, read_architecture
from converters.errors import UserError
from converters.formats.peft import write_adapter_config
from converters.formats.safetensors import read_json
from megarl.cluster.workers.worker import WorkerFailed
from megarl.config.folder import recipes_folder
from megarl.run.checkpoint_files import WriteFile
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
        checkpoints.save(step, lambda _write: {})


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
        checkpoints.save(1, lambda _write: {})
    assert says in raised.value.sentence
    assert list(checkpoints_folder(config).iterdir()) == []


def test_what_the_controller_itself_saves_is_told_alike(config):
    def state(_write: WriteFile) -> dict[str, object]:
        failing(errno.ETIMEDOUT)()
        return {}

    with pytest.raises(CheckpointFailed, match="Connection timed out"), Checkpoints(config, "train", {}) as checkpoints:
        checkpoints.save(1, state)


class Ranks:
    """Ranks that are asked to begin, and have nothing to write."""

    def __init__(self) -> None:
        self.begun = 0

    def begin_save(self, _folder: Path, *, in_background: bool) -> None:
        self.begun += 1

    def save_is_written(self) -> bool:
        return True

    def finish_save(self) -> float:
        return 0.0


class Slow:
    """A large file of the controller, of which a part comes when it is `allowed`; after it the disk may fail."""

    def __init__(self, failure: int | None = None) -> None:
        self.allowed, self.asked, self.ended, self._failure = Event(), Event(), Event(), failure

    def pieces(self) -> Iterator[bytes]:
        try:
            yield b"of some "
            self.asked.set()
            assert self.allowed.wait(60)
            if self._failure is not None:
                failing(self._failure)()
            yield b"groups"
        finally:
            self.ended.set()


def begun(config: MegarlConfig, slow: Slow, *, async_save: bool = True) -> tuple[Checkpoints, Ranks]:
    """Checkpoints of which one, of step 1, is begun, with a file of the controller that is not there yet."""
    config.checkpoint.async_save = async_save
    ranks = Ranks()
    checkpoints = Checkpoints(config, "train", {"": ranks})  # type: ignore[dict-item]

    def state(write: WriteFile) -> dict[str, object]:
        write("groups", slow.pieces())
        return {"groups": 2}

    checkpoints.save(1, state)
    return checkpoints, ranks


def test_a_large_file_of_the_controller_is_written_beside_those_of_the_ranks_and_waited_for(config) -> None:
    checkpoints, ranks = begun(config, slow := Slow())
    with checkpoints:
        assert ranks.begun == 1
        checkpoints.complete_if_written()
        root = checkpoints_folder(config)
        assert slow.asked.wait(60)
        assert checkpoint_folder.complete_iterations(root) == []
        slow.allowed.set()
        checkpoints.complete()
        assert checkpoint_folder.complete_iterations(root) == [1]
    assert (checkpoint_folder.iteration_folder(root, 1) / "groups").read_text() == "of some groups"


def test_a_signal_while_a_large_file_is_waited_for_leaves_no_thread_that_writes(config) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def complete() -> None:
        Timer(2, slow.allowed.set).start()
        Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        checkpoints.complete()

    checkpoints, _ = begun(config, slow := Slow())
    assert slow.asked.wait(60)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), checkpoints:
            complete()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert slow.ended.is_set()


def test_a_checkpoint_has_the_checksum_of_what_was_written_and_reads_no_large_file_again_for_it(config) -> None:
    checkpoints, ranks = begun(config, slow := Slow())
    file = checkpoint_folder.partial_folder(checkpoints_folder(config), 1) / "groups"

    def damage() -> float:
        assert file.read_text() == "of some groups"
        file.write_text("of some grouse")
        return 0.0

    ranks.finish_save = damage  # type: ignore[method-assign]
    slow.allowed.set()
    with checkpoints:
        checkpoints.complete()
    with pytest.raises(UserError, match=r"groups is not the file that .* has the checksum of"):
        latest_checkpoint(config, "train")
    (checkpoint_folder.iteration_folder(checkpoints_folder(config), 1) / "groups").write_text("of some groups")
    assert (found := latest_checkpoint(config, "train")) is not None
    assert found.state["groups"] == 2


@pytest.mark.parametrize("asked", ["complete_if_written", "complete"])
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ETIMEDOUT, CheckpointFailed), (errno.ENOSPC, UserError)], ids=["away", "full"]
)
def test_a_large_file_that_cannot_be_written_ends_the_save(config, number, kind, asked) -> None:
    checkpoints, _ = begun(config, slow := Slow(number))
    slow.allowed.set()
    assert slow.ended.wait(60)
    ask = {"complete_if_written": checkpoints.complete_if_written, "complete": checkpoints.complete}[asked]
    with pytest.raises(kind, match=os.strerror(number)), checkpoints:
        # Its thread may still be about to end.
        repeat(ask)
    assert list(checkpoints_folder(config).iterdir()) == []


def repeat(ask: Callable[[], None]) -> None:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        ask()


def test_a_run_that_waits_for_its_saves_hears_at_once_that_a_large_file_cannot_be_written(config) -> None:
    (slow := Slow(errno.ESTALE)).allowed.set()
    with pytest.raises(CheckpointFailed, match="Stale file handle"):
        begun(config, slow, async_save=False)
    assert list(checkpoints_folder(config).iterdir()) == []


def test_nothing_is_written_to_a_checkpoint_that_a_failed_run_has_left(config) -> None:
    checkpoints, _ = begun(config, slow := Slow())
    assert slow.asked.wait(60)
    allowing = Timer(0.3, slow.allowed.set)
    allowing.start()
    with pytest.raises(ConnectionError), checkpoints:
        raise ConnectionError
    # The run may begin again in this process, with another cluster of Ray, and save the same step.
    assert slow.ended.is_set()
    assert list(checkpoints_folder(config).iterdir()) == []
    allowing.join()
