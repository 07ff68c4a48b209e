"""Kernels are launched once before the threads of a refit start, in the thread that connects a rank."""

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from test_side_stream import SCENE
from transfer_ranks import DestinationRank, SourceRank
from transfer_scenes import STEP

from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0, INT8_CHANNEL, MXFP8
from megarl.resharding.direct import sender
from megarl.resharding.direct.sender import Sender
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.kernels import first_launch, host

CONNECTS = "connects"


@pytest.fixture
def launches(monkeypatch):
    """Name of the thread, kernel, and whether with a checksum, of each launch."""
    found = []

    def noted(kernel):
        def launch(block, before):
            found.append((threading.current_thread().name, kernel.__name__, before is not None))
            return kernel(block, before)

        return launch

    for kernel in (host.gather, host.scatter):
        monkeypatch.setattr(host, kernel.__name__, noted(kernel))
    return found


@pytest.mark.parametrize(("with_checksum", "with_changes"), [(True, False), (False, False), (True, True)])
def test_every_kernel_of_a_refit_was_launched_by_the_thread_that_connected(launches, with_checksum, with_changes):
    source = SourceRank(SCENE, 0)
    workers = [DestinationRank(SCENE, rank) for rank in range(SCENE.workers)]
    everyone, sizes = [source, *workers], []
    listeners, relay_listeners = [source.open()], [worker.open() for worker in workers]
    key = secrets.token_bytes(16)
    rendezvous = Rendezvous(SCENE.transport, key, listeners, None, len(workers), 20.0, relay_listeners)
    rendezvous = replace(rendezvous, with_checksum=with_checksum, with_changes=with_changes)
    with ThreadPoolExecutor(len(everyone), CONNECTS) as pool:
        try:
            list(pool.map(lambda rank: rank.connect(rendezvous), everyone))
            first = list(launches)
            launches.clear()
            for version in (0, STEP)[: 1 + with_changes]:
                source.fill(version)
                sending = pool.submit(source.send, version)
                list(pool.map(lambda worker, version=version: worker.receive(version), workers))
                sizes.append(sending.result().size_bytes)
        finally:
            for rank in everyone:
                rank.close()
    # The source packs; both workers take from it and from each other, pass on, and make changes whole.
    made_whole = [("gather", False)] * 2 if with_changes else []
    moved = [("gather", with_checksum)] * 3 + [("scatter", with_checksum)] * 4
    assert sorted(launch[1:] for launch in first) == made_whole + moved
    assert not with_changes or sizes[1] < sizes[0]
    assert all(thread.startswith(CONNECTS) for thread, *_ in first)
    assert {launch[1:] for launch in launches} == {launch[1:] for launch in first}
    assert not all(thread.startswith(CONNECTS) for thread, *_ in launches)


@pytest.mark.parametrize("number_format", [FP8_BLOCK, FP8_BLOCK_UE8M0, INT8_CHANNEL, MXFP8])
def test_codes_of_every_format_are_made_once(number_format):
    first_launch.launch_gather((number_format, torch.bfloat16), with_checksum=True)


def test_a_source_launches_once_for_each_format_of_its_messages(monkeypatch):
    launched = []
    monkeypatch.setattr(sender, "launch_gather", lambda made, *, with_checksum: launched.append((made, with_checksum)))
    own = SourceRank(SCENE, 0)
    source = Sender(0, own._messages, own._tensors, "127.0.0.1")
    source.load_kernels()
    assert launched == [(None, True)]
    launched.clear()
    formats = {0: None, 1: (FP8_BLOCK, torch.bfloat16), 2: None}
    messages = {0: [0, 1], 1: [2, 1]}
    monkeypatch.setattr(source, "_messages", messages)
    monkeypatch.setattr(source, "_quantised", formats.__getitem__)
    source.load_kernels()
    assert sorted(launched, key=str) == [((FP8_BLOCK, torch.bfloat16), True), (None, True)]
    source.close()
