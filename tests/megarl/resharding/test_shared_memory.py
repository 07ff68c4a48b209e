import multiprocessing
import os
import shutil

import psutil
import pytest
import torch

from converters.errors import UserError
from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.transports.endpoint import Rendezvous, Transport
from megarl.resharding.direct.transports.mapped import SHARED_MEMORY
from megarl.resharding.direct.transports.per_pair import per_pair
from megarl.resharding.shared_memory import Segment, map_segment


def _write_and_wait(handle, written, end):
    map_segment(handle, 64)[:] = 7
    written.set()
    end.wait()


def test_processes_share_a_segment_that_is_not_open_any_more():
    context = multiprocessing.get_context("spawn")
    written, end = context.Event(), context.Event()
    segment = Segment(64)
    memory = segment.memory
    assert torch.equal(memory, torch.zeros(64, dtype=torch.uint8))
    peer = context.Process(target=_write_and_wait, args=(segment.handle(), written, end))
    peer.start()
    assert written.wait(250)
    segment.close()
    assert torch.equal(memory, torch.full((64,), 7, dtype=torch.uint8))
    end.set()
    peer.join()
    assert torch.equal(memory, torch.full((64,), 7, dtype=torch.uint8))


def test_memory_is_reserved_and_never_has_a_name():
    segment = Segment(1 << 20)
    try:
        found = os.stat(segment.handle())
        assert found.st_blocks * 512 >= 1 << 20
        assert found.st_mode & 0o077 == 0
        assert found.st_nlink == 0
    finally:
        segment.close()


def test_a_segment_that_does_not_fit_is_refused_and_leaves_nothing():
    before = psutil.Process().num_fds()
    with pytest.raises(UserError, match="/dev/shm has no room"):
        Segment(shutil.disk_usage("/dev/shm").total + 4096)
    assert psutil.Process().num_fds() == before


def test_mapping_more_than_there_is_fails():
    segment = Segment(64)
    try:
        with pytest.raises(ValueError, match="length"):
            map_segment(segment.handle(), 128)
    finally:
        segment.close()


def test_buckets_of_ranks_that_could_not_connect_are_freed():
    def refuse(*_arguments):
        raise TransferError("the network is gone")

    transport = per_pair(SHARED_MEMORY, Transport(refuse, refuse))
    rendezvous = Rendezvous("tcp", b"", [("here", 1)], None, 1, 1.0)
    before = psutil.Process().num_fds()
    for _ in range(3):
        with pytest.raises(TransferError, match="the network is gone"):
            transport.send_endpoint(rendezvous, 0, 1 << 20)
    assert psutil.Process().num_fds() == before
