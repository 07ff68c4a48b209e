"""One run at a time in an output folder; the lock ends with the process, however that ends."""

import argparse
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.cli.recipe import folder_of_its_own
from megarl.output.lock import LOCK, HeldError, free_folder, sole_writer
from megarl.process.errors import exit_code_of
from megarl.schema import MegarlConfig

HOLD = """
import sys
from pathlib import Path
from megarl.output.lock import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_is_refused_and_told_who_the_first_is(holder, tmp_path):
    with (
        pytest.raises(UserError, match=rf"another run is writing .*run \(process {holder.pid} on "),
        sole_writer(tmp_path / "run"),
    ):
        pass
    with sole_writer(tmp_path / "other"):
        pass


def test_a_killed_process_holds_nothing(holder, tmp_path):
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / LOCK).exists()
    with sole_writer(tmp_path / "run"):
        pass
    assert not (tmp_path / "run" / LOCK).exists()


def test_the_lock_of_a_machine_that_is_gone_can_be_removed(holder, tmp_path):
    lock = tmp_path / "run" / LOCK
    with pytest.raises(HeldError, match=rf"remove {lock} if its machine is gone"), sole_writer(lock.parent):
        pass
    lock.unlink()
    with sole_writer(lock.parent):
        # The first is there all the same, and ends.
        holder.communicate("")
        assert lock.exists()
        with pytest.raises(HeldError), sole_writer(lock.parent):
            pass
    assert not lock.exists()


def test_a_job_that_was_in_the_queue_again_may_find_the_lock_of_its_lost_machine(holder, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    with pytest.raises(HeldError) as caught, sole_writer(tmp_path / "run"):
        pass
    assert exit_code_of(caught.value) == 2
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert exit_code_of(caught.value) == 1
    # Kubernetes has no such count.
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    (tmp_path / "run" / "checkpoints" / "iter_0000001").mkdir(parents=True)
    with pytest.raises(HeldError) as caught, sole_writer(tmp_path / "run"):
        pass
    assert exit_code_of(caught.value) == 1


def test_a_lock_that_another_client_of_nfs_has_removed_is_as_good_as_gone(tmp_path, monkeypatch):
    def stale(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    with sole_writer(tmp_path / "run"):
        (tmp_path / "run" / "metrics.jsonl").touch()
        monkeypatch.setattr(os, "fstat", stale)
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [LOCK, "metrics.jsonl"]


def test_nothing_is_left_where_nothing_was_written(tmp_path):
    with sole_writer(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_stays(tmp_path):
    with sole_writer(tmp_path / "run"):
        (tmp_path / "run" / "metrics.jsonl").write_text("mine")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_place_that_cannot_be_a_folder():
    with pytest.raises(UserError, match="/proc/nothing cannot be written"), sole_writer(Path("/proc/nothing")):
        pass


def test_several_that_write_beside_each_other_have_a_folder_each(tmp_path):
    with free_folder(tmp_path / "eval") as first, free_folder(tmp_path / "eval") as second:
        assert [first.name, second.name] == ["eval", "eval-2"]
        assert first.is_dir()
        assert second.is_dir()
    assert list(tmp_path.iterdir()) == [], "folders that hold nothing go again"
    with free_folder(tmp_path / "eval") as again:
        assert again == first


@pytest.mark.parametrize(
    ("given", "overrides"), [(None, []), ("DIR", []), (None, ["output_dir=DIR"]), (None, ["loop.seed=1"])]
)
def test_only_a_folder_that_was_not_given_makes_way(tmp_path, given, overrides):
    options = argparse.Namespace(output_dir=given, overrides=overrides)
    config = MegarlConfig(output_dir=str(tmp_path / "eval"))
    with sole_writer(tmp_path / "eval"):
        if given or "output_dir=DIR" in overrides:
            with pytest.raises(UserError, match="another run is writing"), folder_of_its_own(config, options):
                pass
        else:
            with folder_of_its_own(config, options) as folder:
                assert folder == tmp_path / "eval-2"
