"""Checkpoint folders: complete under their name, or not there."""

import pytest

from converters.errors import UserError
from megatron_ext import checkpoint_folder


def write(root, iteration, keep=2):
    folder = checkpoint_folder.begin(root, iteration)
    (folder / "part.distcp").write_bytes(b"weights")
    return checkpoint_folder.commit(root, iteration, {"step": iteration}, keep)


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


def test_only_the_newest_are_kept(tmp_path):
    for iteration in (1, 2, 10):
        write(tmp_path, iteration, keep=2)
    assert checkpoint_folder.complete_iterations(tmp_path) == [2, 10]


def test_the_same_iteration_can_be_written_again(tmp_path):
    write(tmp_path, 4)
    write(tmp_path, 4)
    assert checkpoint_folder.complete_iterations(tmp_path) == [4]


def test_place_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write a checkpoint below"):
        checkpoint_folder.begin(tmp_path / "file" / "checkpoints", 1)
