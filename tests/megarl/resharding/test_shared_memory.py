import multiprocessing
import os
import shutil

import pytest
import torch

from converters.errors import UserError
from megarl.resharding.shared_memory import create_segment, map_segment, unlink_segment


def _write_and_wait(path, written, end):
    map_segment(path, 64)[:] = 7
    written.set()
    end.wait()


def test_processes_share_a_segment_that_has_no_name_any_more():
    context = multiprocessing.get_context("spawn")
    written, end = context.Event(), context.Event()
    path = create_segment(64)
    memory = map_segment(path, 64)
    assert torch.equal(memory, torch.zeros(64, dtype=torch.uint8))
    peer = context.Process(target=_write_and_wait, args=(path, written, end))
    peer.start()
    assert written.wait(60)
    unlink_segment(path)
    assert not os.path.exists(path)
    assert torch.equal(memory, torch.full((64,), 7, dtype=torch.uint8))
    end.set()
    peer.join()


def test_memory_is_reserved_when_the_segment_is_made():
    path = create_segment(1 << 20)
    try:
        assert os.stat(path).st_blocks * 512 >= 1 << 20
        assert os.stat(path).st_mode & 0o077 == 0
    finally:
        unlink_segment(path)


def test_a_segment_that_does_not_fit_is_refused_and_leaves_nothing():
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(UserError, match="/dev/shm has no room"):
        create_segment(shutil.disk_usage("/dev/shm").total + 4096)
    assert {name for name in os.listdir("/dev/shm") if name.startswith(f"megarl-{os.getpid()}")} <= before


def test_mapping_more_than_there_is_fails():
    path = create_segment(64)
    try:
        with pytest.raises(ValueError, match="length"):
            map_segment(path, 128)
    finally:
        unlink_segment(path)
