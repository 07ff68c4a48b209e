"""An export that takes the place of another: killed at any moment, there is a complete one, or the next run ends it."""

import subprocess
import sys

import pytest

from megarl.output.export import finish_export, step_of_export, write_export

# Ends the process, as kill -9 would, before the n-th thing that the second export does to the file system.
KILLED = """
import os, sys
from pathlib import Path
from megarl.output.export import write_export
export, kill_at = Path(sys.argv[1]), int(sys.argv[2])
CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree", "open")
done = 0
def count(event, arguments):
    global done
    if event in CHANGES and str(export.parent) in str(arguments):
        done += 1
        if done == kill_at:
            os._exit(9)
def write(folder):
    partial = folder.with_name("half")
    partial.mkdir()
    (partial / "weights").write_text("new")
    partial.rename(folder)
    (folder / "ends").write_text("named after it has its name")
sys.addaudithook(count)
write_export(write, export, step=2)
"""


def write(content):
    def write_folder(folder):
        folder.mkdir()
        (folder / "weights").write_text(content)

    return write_folder


@pytest.fixture
def export(tmp_path):
    folder = tmp_path / "huggingface"
    write_export(write("old"), folder, step=1)
    return folder


def test_the_new_one_takes_the_place_of_the_old_one(export):
    assert step_of_export(export) == 1
    write_export(write("new"), export, step=2)
    assert step_of_export(export) == 2
    assert (export / "weights").read_text() == "new"
    assert [path.name for path in export.parent.iterdir()] == [export.name]


def test_the_old_one_stays_until_the_new_one_is_complete(export):
    def fail(folder):
        assert (export / "weights").read_text() == "old"
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_export(fail, export, step=2)
    assert (export / "weights").read_text() == "old"


def test_killed_at_any_moment(tmp_path):
    ended = False
    for kill_at in range(1, 40):
        export = tmp_path / str(kill_at) / "huggingface"
        export.parent.mkdir()
        write_export(write("old"), export, step=1)
        run = subprocess.run([sys.executable, "-c", KILLED, str(export), str(kill_at)], check=False)
        assert run.returncode in (0, 9)
        complete = [path for path in export.parent.rglob("weights") if path.parent.name != "half" and path.read_text()]
        assert complete
        finish_export(export)
        content = (export / "weights").read_text()
        assert step_of_export(export) == {"old": 1, "new": 2}[content]
        if content == "new":
            assert (export / "ends").read_text() == "named after it has its name"
        if ended := run.returncode == 0:
            break
    assert ended
    assert kill_at > 8
    assert (content, step_of_export(export)) == ("new", 2)


@pytest.mark.parametrize("record", ["", "[]", '{"step": "x"}', "\0"])
def test_a_damaged_record_is_none(export, record):
    (export / "megarl_export.json").write_text(record)
    assert step_of_export(export) is None


@pytest.mark.parametrize("is_there", [True, False])
def test_one_that_was_moved_and_linked_stays_where_it_is(export, tmp_path, is_there):
    moved = tmp_path / "elsewhere" / "model"
    moved.parent.mkdir()
    export.rename(moved if is_there else tmp_path / "elsewhere" / "lost")
    export.symlink_to(moved)
    write_export(write("new"), export, step=2)
    assert not export.is_symlink()
    assert step_of_export(export) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "huggingface"]
    if is_there:
        assert (moved / "weights").read_text() == "old"
