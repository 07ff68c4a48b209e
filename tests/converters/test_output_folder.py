"""A folder has its name when it is complete, can be continued until then, and is not left half done by an error."""

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from conversions import everything_in

from converters.errors import UserError
from converters.output_folder import OutputFolder
from converters.stream.targets import Written

PURPOSE = {"what": "a test"}
NOTED = [Written("data", 0, 4, 1)]


def output(folder: Path, purpose=PURPOSE, nbytes: int = 10) -> OutputFolder:
    return OutputFolder(folder, purpose, nbytes=nbytes)


def stop_with(error: BaseException, folder: Path, purpose=PURPOSE) -> None:
    with output(folder, purpose) as opened:
        (opened.partial / "sub").mkdir(exist_ok=True)
        (opened.partial / "sub/data").write_bytes(b"half")
        (opened.partial / "data").write_bytes(b"half")
        opened.journal.add("a", NOTED)
        raise error


def begin(folder: Path, purpose=PURPOSE) -> None:
    """Leave what Ctrl-C leaves."""
    with pytest.raises(KeyboardInterrupt):
        stop_with(KeyboardInterrupt(), folder, purpose)


def test_a_complete_folder_has_its_name_and_nothing_else(tmp_path):
    with output(tmp_path / "out") as opened:
        (opened.partial / "sub").mkdir()
        (opened.partial / "sub/data").write_bytes(b"all")
        assert not (tmp_path / "out").exists()
        opened.complete()
    assert everything_in(tmp_path) == {"out": None, "out/sub": None, "out/sub/data": b"all"}


def test_an_interrupted_one_is_continued(tmp_path):
    begin(tmp_path / "out")
    with output(tmp_path / "out") as opened:
        assert opened.journal.found == {"a": NOTED}
        assert (opened.partial / "data").read_bytes() == b"half"
        opened.complete()
    assert sorted(everything_in(tmp_path / "out")) == ["data", "sub", "sub/data"]


def test_what_another_command_left_is_deleted(tmp_path):
    begin(tmp_path / "out", {"what": "something else"})
    (tmp_path / "out.partial/link").symlink_to(tmp_path)
    with output(tmp_path / "out") as opened:
        assert opened.journal.found == {}
        assert sorted(path.name for path in opened.partial.iterdir()) == [".journal", ".lock"]
        opened.complete()
    assert everything_in(tmp_path) == {"out": None}


@pytest.mark.parametrize("error", [UserError("wrong"), ValueError("wrong"), AssertionError("wrong")])
def test_an_error_leaves_nothing_not_even_folders_above(error, tmp_path):
    with pytest.raises(type(error), match="wrong"):
        stop_with(error, tmp_path / "new/newer/out")
    assert everything_in(tmp_path) == {}


def test_an_error_of_a_continued_run_leaves_nothing(tmp_path):
    begin(tmp_path / "out")
    with pytest.raises(UserError), output(tmp_path / "out"):
        raise UserError("wrong")
    assert everything_in(tmp_path) == {}


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "has no room"),
        (errno.EDQUOT, "has no room"),
        (errno.EROFS, "cannot be read or written .* change that or choose another folder"),
    ],
)
def test_an_error_of_the_disk_is_one_sentence_and_leaves_nothing(number, message, tmp_path):
    with pytest.raises(UserError, match=message):
        stop_with(OSError(number, os.strerror(number)), tmp_path / "out")
    assert everything_in(tmp_path) == {}


def caused_by(error: OSError) -> UserError:
    found = UserError("a file cannot be read")
    found.__cause__ = error
    return found


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_error_that_may_pass_leaves_what_is_written(number, wrapped, tmp_path):
    error = OSError(number, os.strerror(number))
    said = "a file cannot be read" if wrapped else f"{error.strerror}.; when that has passed, the same command goes on"
    with pytest.raises(UserError, match=said):
        stop_with(caused_by(error) if wrapped else error, tmp_path / "out")
    assert sorted(everything_in(tmp_path / "out.partial")) == [".journal", "data", "sub", "sub/data"]
    with output(tmp_path / "out") as opened:
        assert opened.journal.found == {"a": NOTED}
        opened.complete()


def in_the_way(tmp_path: Path, kind: str) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    {
        "a folder": lambda: out.mkdir(),
        "a file": lambda: out.write_text("mine"),
        "a dangling link": lambda: out.symlink_to(tmp_path / "nowhere"),
        "a partial folder of the user": lambda: (partial.mkdir(), (partial / "mine").write_text("mine")),
        "a partial file": lambda: partial.write_text("mine"),
        "a dangling partial link": lambda: partial.symlink_to(tmp_path / "nowhere"),
    }[kind]()


@pytest.mark.parametrize("kind", ["a folder", "a file", "a dangling link"])
def test_what_exists_is_let_be(kind, tmp_path):
    in_the_way(tmp_path, kind)
    before = everything_in(tmp_path)
    with pytest.raises(UserError, match=r"out exists; delete it or choose another folder$"), output(tmp_path / "out"):
        pass
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("kind", ["a partial folder of the user", "a partial file", "a dangling partial link"])
def test_what_is_in_the_way_is_let_be(kind, tmp_path):
    in_the_way(tmp_path, kind)
    before = everything_in(tmp_path)
    with pytest.raises(UserError, match=r"out.partial is in the way"), output(tmp_path / "out"):
        pass
    assert everything_in(tmp_path) == before


def test_the_current_folder_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="exists"), output(Path(".")):
        pass


@pytest.mark.parametrize("has_lock", [False, True])
def test_a_run_killed_before_it_had_a_journal_is_continued(has_lock, tmp_path):
    (tmp_path / "out.partial").mkdir()
    if has_lock:
        (tmp_path / "out.partial/.lock").touch()
    with output(tmp_path / "out") as opened:
        opened.complete()
    assert everything_in(tmp_path) == {"out": None}


def test_a_parent_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"file/.*cannot be read or written \(Not a directory\)"):
        output(tmp_path / "file/out").__enter__()
    with pytest.raises(UserError, match=r"cannot be read or written \(Not a directory\)"):
        output(tmp_path / "file/sub/out").__enter__()
    assert everything_in(tmp_path) == {"file": b"mine"}


def test_too_little_room_is_said_before_anything_is_written(tmp_path):
    for _ in range(2):  # it is not in its own way
        with pytest.raises(UserError, match=r"has room for [\d,]+ bytes, and [\d,]+ are needed"):
            output(tmp_path / "new/out", nbytes=2**60).__enter__()
        assert everything_in(tmp_path) == {}


def test_too_little_room_to_continue_leaves_what_there_is(tmp_path):
    begin(tmp_path / "out")
    before = everything_in(tmp_path)
    for _ in range(2):
        with pytest.raises(UserError, match="are needed"):
            output(tmp_path / "out", nbytes=2**60).__enter__()
        assert everything_in(tmp_path) == before
    with output(tmp_path / "out") as opened:
        assert opened.journal.found == {"a": NOTED}
        opened.complete()


PROGRAM = """
import sys, time
from contextlib import nullcontext
from pathlib import Path
from converters.output_folder import OutputFolder
with OutputFolder(Path(sys.argv[1]), {"what": "a test"}, nbytes=10) as opened:
    print("ready", flush=True)
    sys.stdin.readline()
    opened.complete()
"""


def test_a_second_process_is_refused_until_the_first_is_done(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path / "out"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "ready\n"
        before = everything_in(tmp_path)
        for purpose in (PURPOSE, {"what": "something else"}):
            with pytest.raises(UserError, match=r"another process is writing .*out.partial"):
                output(tmp_path / "out", purpose).__enter__()
            assert everything_in(tmp_path) == before
        first.stdin.write("go on\n")
        first.stdin.flush()
        assert first.wait() == 0
    assert everything_in(tmp_path) == {"out": None}


def test_a_second_process_does_not_get_what_is_being_deleted(tmp_path, monkeypatch):
    """The journal goes last but for the lock, and the folder when nobody else has it."""
    refused = []

    def refuse_while_deleting(path, *arguments, **keywords):
        with pytest.raises(UserError, match=r"another process is writing|is in the way"):
            output(tmp_path / "out").__enter__()
        refused.append(path)
        return rmtree(path, *arguments, **keywords)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", refuse_while_deleting)
    with pytest.raises(ValueError, match="wrong"):
        stop_with(ValueError("wrong"), tmp_path / "out")
    assert len(refused) == 1
    assert everything_in(tmp_path) == {}


def test_a_file_is_locked_and_no_folder(tmp_path):
    with output(tmp_path / "out") as opened:
        lock = os.open(opened.partial / ".lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
        opened.complete()


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with output(tmp_path / "out") as opened:
        opened.complete()
    assert "out.partial is on a file system without locks" in capsys.readouterr().err
    assert everything_in(tmp_path) == {"out": None}


def test_a_killed_process_holds_nothing(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path / "out"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "ready\n"
        first.kill()
    with output(tmp_path / "out") as opened:
        opened.complete()
    assert everything_in(tmp_path) == {"out": None}


def test_a_kill_at_any_system_call_of_completing_leaves_a_whole_folder_or_one_to_continue(tmp_path, monkeypatch):
    """Instead of a kill, an interruption: what a process does to the disk before either is the same."""
    for stop_at in range(20):
        folder = tmp_path / str(stop_at) / "out"
        calls = iter(range(1000))

        def stop(real, stop_at=stop_at, calls=calls):
            def call(*arguments, **keywords):
                if next(calls) == stop_at:
                    raise KeyboardInterrupt
                return real(*arguments, **keywords)

            return call

        with monkeypatch.context() as patched:
            try:
                with output(folder) as opened:
                    (opened.partial / "data").write_bytes(b"all")
                    for name in ("fsync", "replace", "unlink"):
                        patched.setattr(os, name, stop(getattr(os, name)))
                    opened.complete()
            except KeyboardInterrupt:
                pass
        if not folder.exists():
            with output(folder) as opened:
                opened.complete()
        assert (folder / "data").read_bytes() == b"all"
        assert not (folder / ".lock").exists()
        if next(calls) <= stop_at:
            assert stop_at > 4
            return
    raise AssertionError("completing takes more calls than that")


@pytest.mark.parametrize("kind", ["folders", "files"])
def test_folders_need_not_be_synced_where_that_is_impossible_and_files_need(kind, tmp_path, monkeypatch):
    real = os.fsync

    def sync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (kind == "folders"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    refused = nullcontext() if kind == "folders" else pytest.raises(UserError, match="Invalid argument")
    with refused, output(tmp_path / "out") as opened:
        (opened.partial / "data").write_bytes(b"all")
        opened.complete()
    assert everything_in(tmp_path) == ({"out": None, "out/data": b"all"} if kind == "folders" else {})
