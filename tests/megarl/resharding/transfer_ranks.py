"""Source and destination ranks of a transfer, each in a process of its own, that fail where they are told to."""

import functools
import multiprocessing.forkserver
import os
import sys
from datetime import timedelta
from multiprocessing.managers import BaseManager

import torch
from breaking_points import ACTIONS, break_at, wait_until_still
from transfer_scenes import LOOPBACK, shard_of

from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.destination import Destination
from megarl.resharding.direct.messages_by_peer import incoming, outgoing
from megarl.resharding.direct.sender import Sender
from megatron_ext.loopback import open_store

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}


def start_fork_server(*further):
    """Let all processes be forked from one that has imported this module and UCX; its environment is theirs.

    The first call in a process may name `further` modules.
    """
    multiprocessing.set_forkserver_preload([__name__, "load_nixl", *further])
    before = dict(os.environ)
    # Python 3.11.7 forgets the path when it preloads.
    os.environ.update(_ENVIRONMENT)
    multiprocessing.forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(before)


def without_frames(method):
    """The frames of an error hold what is to be freed, and a manager holds its last error."""

    @functools.wraps(method)
    def call(*arguments):
        try:
            return method(*arguments)
        except (TransferError, RuntimeError) as error:
            kind, message = type(error), str(error)
        raise kind(message)

    return call


class SourceRank:
    def __init__(self, scene, rank):
        scene.enter()
        self._layout, self._rank, dtype = scene.plan.source, rank, scene.source_dtype
        self._tensors = {name: tensor.to(dtype) for name, tensor in shard_of(self._layout, rank, 0).items()}
        self._messages = outgoing(scene.plan, rank, scene.dtypes, scene.bucket_bytes)

    def open(self):
        self._sender = Sender(self._rank, self._messages, self._tensors, LOOPBACK)
        return self._sender.address

    def store(self, timeout_s):
        self._store = open_store(LOOPBACK, timedelta(seconds=timeout_s))
        return LOOPBACK, self._store.port

    def fill(self, version):
        for name, tensor in shard_of(self._layout, self._rank, version).items():
            self._tensors[name].copy_(tensor)

    def pid(self):
        return os.getpid()

    @without_frames
    def connect(self, rendezvous):
        self._sender.connect(rendezvous)
        self._sender.load_kernels()

    @without_frames
    def send(self, version):
        return self._sender.send(version)

    def close(self):
        self._sender.close()
        return mapped_segments()

    def break_at(self, point, count, action):
        break_at(point, count, action)


class DestinationRank:
    def __init__(self, scene, rank):
        scene.enter()
        worker = rank % scene.workers
        self._layout, self._worker, self._dtype, self._rank = scene.plan.destination, worker, scene.dtype, rank
        self._tensors = {
            name: torch.full(shape, torch.nan, dtype=scene.dtype)
            for name, shape in self._layout.local_shapes(worker).items()
        }
        self._messages = incoming(scene.plan, rank, scene.dtypes, scene.bucket_bytes)
        self._read_into = []

    def open(self):
        self._destination = Destination(self._rank, self._messages, self._tensors)
        return self._destination.address

    @without_frames
    def connect(self, rendezvous):
        self._destination.connect(rendezvous)

    @without_frames
    def receive(self, version):
        self._destination.receive(version)

    @without_frames
    def compare(self, version):
        return self._destination.compare(version)

    def disconnect(self):
        self._read_into += self._destination.disconnect()

    def abort(self, reason):
        self._destination._from_sources.abort(reason)

    def zero_copy_pieces(self):
        """How many pieces skip the buckets."""
        return sum(len(places) for of in self._destination._from_sources._zero_copy.values() for places in of.values())

    def sources_by_way(self):
        """By the name of the class of an endpoint, the sources that this rank reaches by it."""
        endpoint, found = self._destination._from_sources._endpoint, {}
        for source in self._messages.direct:
            found.setdefault(type(endpoint._way(source)).__name__, []).append(source)
        return found

    def read_when_still(self, pid):
        """Let it read the first message when a process stands still."""
        ACTIONS["wait"] = functools.partial(wait_until_still, pid)
        break_at("heard", 1, "wait")

    def scramble(self, name):
        self._tensors[name].neg_()

    def forget(self):
        self._destination._from_sources._held.clear()

    def wrong(self, version):
        """Names of tensors that are not those of `version`, or not yet written; padding aside."""
        expected = shard_of(self._layout, self._worker, version)
        padding = {}
        for name, box in self._layout.shard(self._worker).padding:
            padding[name] = box.slices()
        found = []
        for name, tensor in self._tensors.items():
            if name in padding:
                expected[name][padding[name]] = torch.nan
            if not torch.equal(tensor.nan_to_num(7), expected[name].to(self._dtype).nan_to_num(7)):
                found.append(name)
        return found

    def close(self):
        self._read_into += self._destination.close()
        return mapped_segments()

    def break_at(self, point, count, action):
        break_at(point, count, action)


class RankProcess(BaseManager):
    """Serves calls of its rank's proxy in threads of their own."""


RankProcess.register("source", SourceRank)
RankProcess.register("destination", DestinationRank)


def mapped_segments():
    """How many shared-memory segments this process has mapped."""
    return sum("/dev/shm/" in line for line in open("/proc/self/maps"))
