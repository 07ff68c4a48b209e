"""Checkpoint folders: complete under their name, or not there."""

import errno
import shutil

import pytest
from isal.isal_zlib import crc32

from converters.errors import UserError
from converters.stream.targets import Written
from megatron_ext.checkpoint import checkpoint_folder


def write(root, iteration, keep=2, keep_every=0):
    folder = checkpoint_folder.begin(root, iteration)
    (folder / "part.distcp").write_bytes(b"weights")
    return checkpoint_folder.commit(root, iteration, {"step": iteration}, keep, keep_every)


def test_committed_folder_is_complete_and_latest(tmp_path):
    folder = write(tmp_path, 3)
    assert checkpoint_folder.complete_iterations(tmp_path) == [3]
    assert folder == checkpoint_folder.iteration_folder(tmp_path, 3)
    assert checkpoint_folder.read_controller_state(folder) == {"step": 3}
    assert (tmp_path / checkpoint_folder.LATEST).read_text() == "3"


def test_half_written_folder_is_never_the_latest(tmp_path):
    write(tmp_path, 1)
    half = checkpoint_folder.begin(tmp_path, 2)
    (half / "part.distcp").write_bytes(b"wei")
    assert checkpoint_folder.complete_iterations(tmp_path) == [1]
    # The next attempt starts from nothing.
    again = checkpoint_folder.begin(tmp_path, 2)
    assert list(again.iterdir()) == []
    checkpoint_folder.abandon(tmp_path, 2)
    assert not again.exists()


def test_a_step_saved_again_has_a_checkpoint_whenever_the_run_is_killed(tmp_path, monkeypatch):
    write(tmp_path, 3)
    remove = shutil.rmtree

    def killed(folder, **options):
        remove(folder, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 3)
    assert checkpoint_folder.complete_iterations(tmp_path) == [3]
    monkeypatch.undo()
    write(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", checkpoint_folder.LATEST]


def test_only_the_newest_are_kept(tmp_path):
    for iteration in (1, 2, 10):
        write(tmp_path, iteration, keep=2)
    assert checkpoint_folder.complete_iterations(tmp_path) == [2, 10]


def test_those_that_a_number_divides_are_kept_for_good(tmp_path):
    for iteration in range(2, 15, 2):
        write(tmp_path, iteration, keep=1, keep_every=4)
    assert checkpoint_folder.complete_iterations(tmp_path) == [4, 8, 12, 14]


def test_a_run_killed_as_it_deletes_leaves_no_half_of_a_checkpoint(tmp_path, monkeypatch):
    write(tmp_path, 1)
    remove = shutil.rmtree

    def killed(folder, **_options):
        next(folder.iterdir()).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 2, keep=1)
    assert checkpoint_folder.complete_iterations(tmp_path) == [2]
    monkeypatch.setattr("shutil.rmtree", remove)
    write(tmp_path, 3, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", checkpoint_folder.LATEST]


def test_an_old_one_that_somebody_reads_ends_no_run_and_goes_with_the_next(tmp_path, monkeypatch, capsys):
    write(tmp_path, 1)

    def busy(folder, **_options):
        # As NFS has it while a file there is open on this machine.
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))

    monkeypatch.setattr("shutil.rmtree", busy)
    for iteration in (2, 3):
        write(tmp_path, iteration, keep=1)
    assert checkpoint_folder.complete_iterations(tmp_path) == [3]
    assert "iter_0000001.deleted.partial cannot be removed" in capsys.readouterr().err
    monkeypatch.undo()
    write(tmp_path, 4, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000004", checkpoint_folder.LATEST]


def test_the_same_iteration_can_be_written_again(tmp_path):
    write(tmp_path, 4)
    write(tmp_path, 4)
    assert checkpoint_folder.complete_iterations(tmp_path) == [4]


def test_one_that_cannot_take_the_name_of_another_leaves_that_where_it_was(tmp_path, monkeypatch):
    write(tmp_path, 4)

    def fail(partial, folder):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(checkpoint_folder, "rename", fail)
    with pytest.raises(UserError, match="the last complete checkpoint is untouched"):
        write(tmp_path, 4)
    assert checkpoint_folder.complete_iterations(tmp_path) == [4]
    assert checkpoint_folder.read_controller_state(checkpoint_folder.iteration_folder(tmp_path, 4)) == {"step": 4}


def cut_state(folder):
    path = folder / checkpoint_folder.CONTROLLER_STATE
    path.write_bytes(path.read_bytes()[:-2])


def flip_manifest(folder):
    path = folder / "megarl_manifest.json"
    path.write_text(path.read_text().replace('"iteration":4', '"iteration":5'))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_state, r"megarl.json is not the file that .*megarl_manifest.json has the checksum of"),
        (lambda folder: (folder / "megarl.json").unlink(), r"megarl.json is missing"),
        (lambda folder: (folder / "part.distcp").write_bytes(b"weight"), r"part.distcp is not the file"),
        (lambda folder: (folder / "critic/common.pt").write_bytes(b"commom"), r"critic/common.pt is not the file"),
        (flip_manifest, r"megarl_manifest.json is damaged"),
        (lambda folder: (folder / "megarl_manifest.json").unlink(), r"has no megarl_manifest.json"),
    ],
)
def test_a_damaged_checkpoint_is_one_sentence(damage, says, tmp_path):
    partial = checkpoint_folder.begin(tmp_path, 4)
    (partial / "critic").mkdir()
    (partial / "critic/common.pt").write_bytes(b"common")
    (partial / "part.distcp").write_bytes(b"weights")
    checkpoint_folder.list_written(partial, {"w": [Written("part.distcp", 0, 7, crc32(b"weights"))]})
    folder = checkpoint_folder.commit(tmp_path, 4, {"step": 4}, keep=1)
    assert checkpoint_folder.read_controller_state(folder) == {"step": 4}
    assert not list(folder.rglob("written.json"))
    damage(folder)
    with pytest.raises(UserError, match=says):
        checkpoint_folder.read_controller_state(folder)


def test_place_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write a checkpoint below"):
        checkpoint_folder.begin(tmp_path / "file" / "checkpoints", 1)
