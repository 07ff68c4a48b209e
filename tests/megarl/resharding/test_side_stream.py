"""A refit waits on a device for its own stream, and the whole device once, before it touches a tensor."""

import secrets
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from small_configs import make_config
from transfer_ranks import DestinationRank, SourceRank
from transfer_scenes import LOOPBACK, Scene

from converters.layouts.parallel_sizes import ParallelSizes
from converters.topology import Topology
from megarl.resharding.direct import receiver, sender
from megarl.resharding.direct.connections import Link
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.wire import Acknowledgement, Announcement
from megatron_ext import device

SIZES = ParallelSizes(world_size=1)
SCENE = Scene(make_config("qwen3"), SIZES, workers=2, topology=Topology([0], [0], [1, 1], [1, 2]))


class Streams:
    """Notes what each thread asks for that has not been waited for, and what it waits for."""

    def __init__(self):
        self.entered, self.pending, self.waits = set(), Counter(), Counter()
        self.too_early, self.outside = [], []

    def asks(self, function):
        def call(*arguments, **options):
            thread = threading.get_ident()
            if thread not in self.entered:
                self.outside.append(function.__name__)
            self.pending[thread] += 1
            return function(*arguments, **options)

        return call

    def says(self, function):
        def call(link, message):
            if isinstance(message, Announcement | Acknowledgement) and self.pending[threading.get_ident()]:
                self.too_early.append(message)
            return function(link, message)

        return call

    def whole_device(self):
        self.waits["device"] += 1

    def stream(self):
        noted = self

        class Stream:
            def entered(self):
                return self

            def __enter__(self):
                noted.entered.add(threading.get_ident())

            def __exit__(self, *_):
                noted.entered.discard(threading.get_ident())

            def synchronize(self):
                noted.pending[threading.get_ident()] = 0
                noted.waits["stream"] += 1

        return Stream()


@pytest.fixture
def streams(monkeypatch):
    noted = Streams()
    monkeypatch.setattr(device, "SideStream", noted.stream)
    monkeypatch.setattr(device, "synchronize", noted.whole_device)
    monkeypatch.setattr(sender, "pack", noted.asks(sender.pack))
    monkeypatch.setattr(receiver, "unpack", noted.asks(receiver.unpack))
    monkeypatch.setattr(Link, "send", noted.says(Link.send))
    return noted


def test_only_the_own_stream_is_waited_for_message_by_message(streams):
    source = SourceRank(SCENE, 0)
    workers = [DestinationRank(SCENE, rank) for rank in range(SCENE.workers)]
    everyone = [source, *workers]
    listeners, relay_listeners = [source.open()], [worker.open() for worker in workers]
    rendezvous = Rendezvous(
        SCENE.transport, secrets.token_bytes(16), listeners, None, len(workers), 20.0, relay_listeners
    )
    with ThreadPoolExecutor(len(everyone)) as pool:
        try:
            list(pool.map(lambda rank: rank.connect(rendezvous), everyone))
            moves = [lambda: source.send(0), *(lambda worker=worker: worker.receive(0) for worker in workers)]
            list(pool.map(lambda move: move(), moves))
        finally:
            for rank in everyone:
                rank.close()
    assert [worker.wrong(0) for worker in workers] == [[], []]
    assert listeners[0][0] == LOOPBACK
    assert not streams.too_early, "announced or acknowledged before the device was done with it"
    assert not streams.outside
    assert streams.waits["device"] == len(everyone)
    assert streams.waits["stream"] > 10 * len(everyone)
