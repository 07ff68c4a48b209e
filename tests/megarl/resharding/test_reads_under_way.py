"""A worker that closes while it reads: its reads end first, and what a read may still go into stays."""

import gc
import multiprocessing
import os
import time
import weakref
from itertools import count
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.transports import nixl_agent
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.transports.nixl_agent import RemoteMemory
from megarl.resharding.direct.transports.rdma import RDMA, RdmaOffer
from megarl.resharding.direct.weight_receiver import WeightReceiver

UNDER_WAY, DONE = "in progress", "success"
OFFER = RdmaOffer(RemoteMemory(b"", "cpu", 0, (0, 0)), 8, {})


class BrokenError(Exception):
    """An error as NIXL has them."""


class PlayedNixl(ModuleType):
    """NIXL, whose only agent notes what it is asked; reads after the first are as `statuses` says, asked by asked."""

    NIXL_SUCCESS, NIXL_READ, DRAM_SEG = DONE, "read", "dram"

    def __init__(self):
        super().__init__("nixl")
        self.asked, self.statuses, begun = [], iter(()), count(1)
        self.BrokenError, self.nixlAgentConfig = BrokenError, SimpleNamespace
        self.nixlRegDList = self.nixlXferDList = lambda _kind, regions: regions
        self.nixlAgent = lambda _name, _config: self
        self.loadRemoteMD = lambda _metadata: b"trainer rank 3"
        self.createXferReq = lambda *_: next(begun)
        self.postXferReq = lambda handle: DONE if handle == 1 else UNDER_WAY
        self.getXferStatus = self._status

    def _status(self, handle):
        self.asked.append(f"status {handle}")
        status = next(self.statuses)
        if isinstance(status, Exception):
            raise status
        return status

    def __getattr__(self, method):
        return lambda *_: self.asked.append(method)


@pytest.fixture
def nixl(monkeypatch):
    played = PlayedNixl()
    monkeypatch.setattr(nixl_agent, "_bindings", lambda: played)
    monkeypatch.setattr(nixl_agent, "_DRAIN_S", 0.1)
    return played


def reading(nixl):
    """A destination that reads two messages."""
    destination = RDMA.recv_endpoint(Rendezvous("rdma", b"", [], None, 1, 1.0), 0, 8, lambda: None)
    destination.connect(3, OFFER)
    destination.all_connected()
    for bucket in range(2):
        destination.pull(3, bucket, 8)
    nixl.asked.clear()
    return destination


@pytest.mark.parametrize("end", [DONE, BrokenError("the source is gone")])
def test_reads_end_before_anything_is_closed(nixl, end):
    destination = reading(nixl)
    # NIXL gives the error of a read again and again.
    nixl.statuses = iter([UNDER_WAY, UNDER_WAY, end, UNDER_WAY, *([] if end is DONE else [end]), DONE])
    assert list(destination.close()) == []
    polls = [asked for asked in nixl.asked if asked.startswith("status")]
    assert {*polls} == {"status 2", "status 3"}
    assert nixl.asked == [*polls, *["releaseXferReq"] * 2, "invalidateRemoteMD", "deregisterMem"]
    # Nothing is left that could be closed again.
    nixl.asked.clear()
    assert list(destination.close()) == []
    assert nixl.asked == []


class Silent:
    """A destination that does not come to its end, as `Destination`."""

    def __init__(self, endpoint):
        self._endpoint = endpoint

    def receive(self, version):
        raise TransferError(f"no version {version}")

    def disconnect(self):
        endpoint, self._endpoint = self._endpoint, None
        return () if endpoint is None else endpoint.close()

    close = disconnect


def test_what_is_read_into_for_too_long_stays_until_the_next_transfer_and_the_failure_is_told(nixl):
    destination = reading(nixl)
    places = [torch.zeros(8, dtype=torch.uint8)]
    destination.take_into(places)
    nixl.asked.clear()
    memory = [weakref.ref(each) for each in (destination._agent, *destination._own, *places)]
    nixl.statuses = iter(lambda: UNDER_WAY, None)
    receiver = WeightReceiver(SimpleNamespace(), 0)
    receiver._destination = Silent(destination)
    del destination, places
    with pytest.raises(TransferError, match=r"^no version 7$"):
        receiver.receive(7)
    receiver.close()
    gc.collect()
    assert [each() is None for each in memory] == [False] * 4
    assert {"releaseXferReq", "invalidateRemoteMD", "deregisterMem"}.isdisjoint(nixl.asked)
    # The reads have ended by the time of the next transfer, which is never opened here.
    nixl.statuses = iter(lambda: DONE, None)
    with pytest.raises(AttributeError, match="loaded_parameters"):
        receiver.open(SimpleNamespace(traces=[None]), 0)
    gc.collect()
    assert [each() is None for each in memory] == [True] * 4
    assert nixl.asked[-5:] == ["releaseXferReq", "releaseXferReq", "invalidateRemoteMD", *["deregisterMem"] * 2]


LARGE = 2**25
RENDEZVOUS = Rendezvous("rdma", b"", [], None, 1, timeout_s=60.0)
SOCKETS = "tcp,self"


def serve(pipe):
    """Be a source whose buckets are read through sockets, until there is news."""
    os.environ["UCX_TLS"] = SOCKETS
    source = RDMA.send_endpoint(RENDEZVOUS, 3, LARGE)
    pipe.send(source.offer(0))
    pipe.recv()
    source.close()


def test_a_worker_that_closes_while_it_reads_through_sockets_does_not_end_the_rank(monkeypatch):
    monkeypatch.setenv("UCX_TLS", SOCKETS)
    monkeypatch.setattr(nixl_agent, "_DRAIN_S", 60.0)
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    rank = context.Process(target=serve, args=(there,))
    rank.start()
    offer = here.recv()
    # NIXL's thread in the other process is in the middle of its replies at one time or another.
    for attempt in range(8):
        destination = RDMA.recv_endpoint(RENDEZVOUS, attempt, LARGE, lambda: None)
        destination.connect(3, offer)
        destination.all_connected()
        reads = [destination.pull(3, bucket, LARGE) for bucket in range(2)]
        until = time.monotonic() + 0.003 * (attempt % 4)
        while time.monotonic() < until:
            destination._agent._is_over(reads[0].args[0])
        assert list(destination.close()) == []
    time.sleep(0.5)
    here.send("end")
    rank.join(120)
    assert rank.exitcode == 0
