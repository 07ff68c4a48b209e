"""A run's folder below /tmp: its own alone, gone with it, and nobody else's is touched."""

import errno
import fcntl
import multiprocessing
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from converters.errors import UserError
from megarl.process import file_system, scratch
from megarl.process.scratch import note_segment, scratch_folder, scratch_folder_of_process

HOLD = """
import sys
from megarl.process.scratch import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""
DEAD = 4194200


@pytest.fixture(autouse=True)
def tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def other(tmp):
    """Another run, with its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp)},
    )
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


@pytest.fixture
def segment():
    """A file of shared memory that somebody left."""
    path = Path("/dev/shm", f"megarl-test-{os.getpid()}")
    path.touch()
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_that_of_a_process_goes_when_it_exits(tmp, monkeypatch, method):
    monkeypatch.setenv("TMPDIR", str(tmp))
    kept = scratch_folder_of_process()
    with multiprocessing.get_context(method).Pool(1) as pool:
        folder = pool.apply(scratch_folder_of_process)
        assert {path for path in tmp.iterdir() if path.name.startswith("megarl-")} == {kept, folder}
        pool.close()
        pool.join()
    assert kept.exists()
    assert not folder.exists()
    program = "from megarl.process.scratch import *; print(scratch_folder_of_process())"
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert Path(said.stdout.strip()).parent == tmp
    assert not Path(said.stdout.strip()).exists()


def test_it_is_open_to_nobody_else_and_goes(tmp):
    with scratch_folder() as folder:
        assert folder.parent == tmp
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "socket").write_text("")
    assert list(tmp.iterdir()) == []


def take(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_it_lies_where_the_path_of_a_socket_fits(tmp, monkeypatch):
    with TemporaryDirectory(prefix="m", dir="/tmp") as short:
        monkeypatch.setattr(scratch, "_SHORT", (tmp / "absent", Path(short)))
        fits = 107 - len(f"{tmp}/megarl-{os.getpid()}-12345678/")
        with scratch_folder("s" * fits) as folder:
            assert folder.parent == tmp
            take(folder / ("s" * fits))
        with scratch_folder("s" * (fits + 1)) as folder:
            assert folder.parent == Path(short)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            take(folder / ("s" * (fits + 1)))
        assert list(Path(short).iterdir()) == []
        # One that a killed run left.
        left = Path(short, f"megarl-{DEAD}-abc")
        left.mkdir()
        (left / "held").touch()
        with scratch_folder():
            assert not left.exists()
        monkeypatch.setattr(scratch, "_SHORT", (tmp / "absent",))
        with pytest.raises(UserError, match=rf"^below TMPDIR={tmp} .* at most {len(str(tmp)) - 1} bytes$"):
            scratch_folder("s" * (fits + 1)).__enter__()


def test_what_a_killed_run_left_goes_with_the_next(other, segment):
    process, folder = other
    of_server = folder / "megarl-server"
    of_server.mkdir()
    note_segment(of_server, segment.name)
    with scratch_folder():
        assert segment.exists()
    process.kill()
    process.wait()
    assert folder.is_dir()
    with scratch_folder():
        assert not folder.exists()
        assert not segment.exists()


@pytest.mark.parametrize("is_here", [True, False])
def test_on_a_file_system_of_several_machines_no_other_is_taken_for_dead(
    other, tmp, tmp_path_factory, monkeypatch, is_here
):
    """Some say of locks what this machine has alone."""
    mounts = tmp_path_factory.mktemp("kernel") / "mounts"
    mounts.write_text(f"overlay / overlay rw 0 0\nfast {tmp} lustre rw,localflock 0 0\n")
    monkeypatch.setattr(file_system, "_MOUNTS", mounts)
    process, folder = other
    process.kill()
    process.wait()
    if not is_here:
        (folder / "held").write_text("f3a1c7e2-0000-4000-8000-000000000000\n")
    with scratch_folder() as own:
        assert own.parent == tmp
        assert folder.exists() != is_here


def test_without_locks_there_is_one_all_the_same(tmp, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, "no locks")))
    with scratch_folder() as folder, scratch_folder():
        assert folder.exists()
    assert list(tmp.iterdir()) == []


def test_a_segment_goes_with_it_and_others_stay(segment):
    with scratch_folder() as folder:
        note_segment(folder, segment.name)
        note_segment(folder, segment.name)
        note_segment(folder, f"{segment.name}-that-was-never-made")
    assert not segment.exists()
    segment.touch()
    with scratch_folder():
        pass
    assert segment.exists()


def test_a_live_run_is_left_alone_whatever_its_number_says(other, tmp):
    _, folder = other
    # As seen from another pid namespace: no process here has this number.
    renamed = folder.rename(tmp / f"megarl-{DEAD}-abc")
    with scratch_folder():
        pass
    assert renamed.is_dir()


def test_folders_of_others_stay(tmp):
    mine = tmp / f"megarl-{DEAD}-my-notes"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    linked = tmp / f"megarl-{DEAD}-link"
    linked.symlink_to(mine)
    (mine / "held").symlink_to(mine / "thesis.txt")
    with scratch_folder():
        pass
    assert (mine / "thesis.txt").read_text() == "years of work"
    assert linked.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_folder_of_another_user_stays(other):
    process, folder = other
    process.kill()
    process.wait()
    os.chown(folder, 12345, -1)
    with scratch_folder():
        pass
    assert folder.is_dir()
