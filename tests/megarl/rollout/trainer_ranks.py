"""Trainer ranks without a trainer: their tensors are those of HuggingFace folders, and an engine gets them directly."""

import multiprocessing
import secrets
from datetime import timedelta
from multiprocessing.managers import BaseManager

import torch
from breaking_points import break_at, wait_until_still
from transfer_scenes import LOOPBACK

from converters.architectures import read_architecture
from converters.copying import read_into
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.layouts.parallel_sizes import ParallelSizes
from converters.topology import Topology
from megarl.resharding.direct.quantised_shard import Quantisation
from megarl.resharding.direct.sender import Sender
from megarl.resharding.direct.transfer_spec import TransferSpec, held_dtypes
from megarl.resharding.direct.transports import TRANSPORTS
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.weight_receiver import WeightReceiver
from megatron_ext.loopback import open_store

RANKS = ParallelSizes(world_size=2, tensor_model_parallel_size=2)


class TrainerRank:
    def __init__(self, spec, rank):
        self._shard = spec.plan.source.shard(rank)
        self._tensors = {name: torch.zeros(shape) for name, shape in self._shard.local_shapes.items()}
        self._streams, self._rank = spec.outgoing(rank), rank

    def open(self):
        self._sender = Sender(self._rank, self._streams, self._tensors, LOOPBACK)
        return self._sender.address

    def load(self, folder):
        read_into(HuggingFaceCheckpoint(folder), self._shard.placements, self._tensors)

    def connect(self, rendezvous):
        self._sender.connect(rendezvous)

    def send(self, version):
        return self._sender.send(version)

    def break_at(self, *arguments):
        break_at(*arguments)


class _Process(BaseManager):
    pass


_Process.register("rank", TrainerRank)


class Trainer:
    """The ranks, each in a process, and the spec to `engine`, which is of the model in `folder`."""

    def __init__(self, engine, folder, pool, number_format=None):
        self._engine, self._pool, self._processes = engine, pool, []
        architecture = read_architecture(read_json(folder / CONFIG))
        shapes, dtypes = architecture.hf_shapes, architecture.hf_dtypes(torch.float32)
        quantisation = Quantisation(number_format, torch.float32) if number_format else None
        if number_format:
            shapes = number_format.checkpoint(architecture)[0]
        traces = [
            trace.unpacked() for trace in engine.trace_layout(shapes, held_dtypes(architecture, dtypes, quantisation))
        ]
        topology = Topology.apart(RANKS.world_size, len(traces))
        self.spec = TransferSpec(architecture, RANKS, "local", traces, 1, topology, 20_000, quantisation)
        self.spec.check(dtypes)
        self.ranks = [self._start(rank) for rank in range(RANKS.world_size)]

    def _start(self, rank):
        process = _Process(ctx=multiprocessing.get_context("forkserver"))
        process.start()
        self._processes.append(process)
        return process.rank(self.spec, rank)

    def connect(self, timeout_s=20.0, transport="shared_memory", with_changes=False):
        store = None
        if TRANSPORTS[transport].needs_store:
            self._store = open_store(LOOPBACK, timedelta(seconds=timeout_s))
            store = LOOPBACK, self._store.port
        listeners = [rank.open() for rank in self.ranks]
        workers = len(self.spec.traces)
        relay_listeners = self._engine.call_receivers(WeightReceiver.open, self.spec, 0)
        rendezvous = Rendezvous(
            transport,
            secrets.token_bytes(16),
            listeners,
            store,
            workers,
            timeout_s,
            relay_listeners,
            with_changes=with_changes,
        )
        connecting = [self._pool.submit(rank.connect, rendezvous) for rank in self.ranks]
        self._engine.call_receivers(WeightReceiver.connect, rendezvous)
        for each in connecting:
            each.result(250)

    def begin_send(self, version):
        return [self._pool.submit(rank.send, version) for rank in self.ranks]

    def stop_sending(self, version):
        """Send to an engine that receives, until a rank stands still for good: the engine has taken some messages."""
        # A rank has two buckets, and packs the first again when it was acknowledged.
        self.ranks[1].break_at("packed", 3, "stop")
        self.begin_send(version)
        wait_until_still(self._processes[1]._process.pid)

    def load(self, folder):
        for rank in self.ranks:
            rank.load(folder)

    def update(self, version):
        """Returns the bytes that travelled."""
        self._engine.begin_update(version, list(self.spec.architecture.hf_shapes))
        sending = self.begin_send(version)
        self._engine.receive(version)
        moved = [each.result(250).size_bytes for each in sending]
        self._engine.commit_update(version)
        return sum(moved)

    def compare(self, version):
        sending = self.begin_send(version)
        found = set().union(*self._engine.call_receivers(WeightReceiver.compare, version))
        for each in sending:
            each.result(250)
        return found

    def end(self):
        for process in self._processes:
            process._process.kill()
            process._process.join()
