"""Source and destination ranks of a transfer, each in a process of its own, that fail where they are told to."""

import functools
import gc
import multiprocessing.forkserver
import os
import secrets
import signal
import sys
import threading
import time
import zlib
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.managers import BaseManager
from pathlib import Path

import torch

from converters.architectures import read_architecture
from converters.copying import copy_transfers
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.megatron import megatron_layout
from converters.layouts.parallel_sizes import ParallelSizes
from converters.plan import Cutting, Plan, plan
from converters.topology import Topology
from megarl.resharding.direct import connections
from megarl.resharding.direct import receiver as receiving
from megarl.resharding.direct import sender as sending
from megarl.resharding.direct.connections import Link, TransferError
from megarl.resharding.direct.destination import Destination
from megarl.resharding.direct.messages_by_peer import incoming, outgoing
from megarl.resharding.direct.sender import Sender
from megarl.resharding.direct.transports import MAPPED, TRANSPORTS
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.wire import Acknowledgement, Announcement
from megatron_ext.loopback import open_store

LOOPBACK = "127.0.0.1"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}


def start_fork_server():
    """Let all processes be forked from one that has imported this module and UCX; its environment is theirs."""
    multiprocessing.set_forkserver_preload([__name__, "load_nixl"])
    before = dict(os.environ)
    # Python 3.11.7 forgets the path when it preloads.
    os.environ.update(_ENVIRONMENT)
    multiprocessing.forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(before)


@dataclass(frozen=True)
class Scene:
    """A model, how the trainer cuts it, how many engine replicas of how many workers, and how they are joined."""

    config: dict
    source: ParallelSizes
    workers: int = 2
    replicas: int = 1
    bucket_bytes: int = 700
    transport: str = "shared_memory"
    ucx_tls: str = ""
    """The ways that UCX may take, of which it otherwise takes the best."""
    source_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.bfloat16
    timeout_s: float = 20.0
    topology: Topology | None = None
    """With one, what a node needs enters it once, also if it is small."""

    def enter(self):
        """Set what this scene has in the environment of a rank's process."""
        # An error that holds itself would keep memory mapped until a collection, which may come early or late.
        gc.disable()
        if self.ucx_tls:
            os.environ["UCX_TLS"] = self.ucx_tls

    @property
    def architecture(self):
        return read_architecture(self.config)

    @property
    def plan(self):
        return Plan(
            megatron_layout(self.architecture, self.source, module_names="local"),
            megatron_layout(
                self.architecture,
                ParallelSizes(world_size=self.workers, tensor_model_parallel_size=self.workers),
                module_names="local",
            ),
            self.replicas,
            self.topology,
            node_once=self.topology is not None,
            cutting=Cutting(grain=2, smallest=8) if self.topology else Cutting(),
        )

    @property
    def dtypes(self):
        shapes = map(self.plan.destination.local_shapes, range(self.workers))
        return [dict.fromkeys(each, self.dtype) for each in shapes]


STEP = 1000
"""A version of so many more has few elements that are others."""


def values_of(name, shape, version):
    """Random values that depend on version and HF name alone."""
    steps, first = divmod(version, STEP)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + first))
    values.view(-1)[steps % 97 :: 97] += steps
    return values


def shard_of(layout, rank, version):
    """The tensors of a rank of any layout, of a version."""
    hf = {name: values_of(name, shape, version) for name, shape in layout.hf_shapes.items()}
    tensors = {name: torch.zeros(shape) for name, shape in layout.local_shapes(rank).items()}
    for transfer in plan(huggingface_layout(layout.hf_shapes), layout):
        if transfer.destination_rank == rank:
            copy_transfers([transfer], hf, tensors)
    return tensors


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

    @without_frames
    def send(self, version, with_checksum=True, delta=False):
        return self._sender.send(version, with_checksum=with_checksum, delta=delta)

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

    def abort(self, reason):
        self._destination._from_sources.abort(reason)

    def straight_pieces(self):
        """How many pieces skip the buckets."""
        return sum(len(places) for of in self._destination._from_sources._straight.values() for places in of.values())

    def sources_by_way(self):
        """By the name of the class of an endpoint, the sources that this rank reaches by it."""
        endpoint, found = self._destination._from_sources._endpoint, {}
        for source in self._messages.direct:
            found.setdefault(type(endpoint._way(source)).__name__, []).append(source)
        return found

    def read_when_still(self, pid):
        """Let it read the first message when a process stands still."""
        ACTIONS["wait"] = functools.partial(_wait_until_still, pid)
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
        self._destination.close()
        return mapped_segments()

    def break_at(self, point, count, action):
        break_at(point, count, action)


def mapped_segments():
    """How many shared-memory segments this process has mapped."""
    return sum("/dev/shm/" in line for line in open("/proc/self/maps"))


def _kill(*_, **_options):
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(*_, **_options):
    # To this thread: what the process gets another thread may take, and this one goes on for a while.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _fail(*_, **_options):
    raise RuntimeError("on purpose")


def _fail_late(*_, **_options):
    _linger()
    _fail()


def _corrupt(blocks, **_):
    blocks[-1].memory[-1] ^= 1


def _garble(blocks, **_):
    for block in blocks:
        block.memory.fill_(0x3D)


def _linger(*_, **_options):
    time.sleep(1.0)


def _wait_until_still(pid, *_, **_options):
    """Wait for all threads of a process: one may go on for a while after another has stopped."""
    deadline = time.monotonic() + 20
    while _states(pid) != {"T"}:
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.01)


def _states(pid):
    """The states of a process's threads, as Linux calls them."""
    found = set()
    for each in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found.add(each.read_text().rpartition(")")[2].split()[0])
    return found


ACTIONS = {
    "linger": _linger,
    "kill": _kill,
    "stop": _stop,
    "fail": _fail,
    "fail late": _fail_late,
    "corrupt": _corrupt,
    "garble": _garble,
}
POINTS = {
    "accept": (sending.Listener, "accept", None),
    "packed": (sending, "pack", None),
    "announced": (Link, "send", Announcement),
    "came": (receiving.Receiver, "__init__", None),
    "connected": (receiving, "digest", None),
    "heard": (receiving.Receiver, "_check", None),
    "unpacked": (receiving, "unpack", None),
    "acknowledged": (Link, "send", Acknowledgement),
    "notified": (connections, "notify_failure", None),
}


def break_at(point, count, action):
    """In this process, after the `count`-th time that `point` was passed, from now on: `action`."""
    owner, name, kind = POINTS[point]
    original, passed = getattr(owner, name), 0

    def breaking(*arguments, **options):
        nonlocal passed
        result = original(*arguments, **options)
        if kind is None or isinstance(arguments[-1], kind):
            passed += 1
            if passed == count:
                ACTIONS[action](*arguments, **options)
        return result

    setattr(owner, name, breaking)


class _Process(BaseManager):
    """Serves calls of its rank's proxy in threads of their own."""


_Process.register("source", SourceRank)
_Process.register("destination", DestinationRank)


class Stage:
    """The ranks of a scene, all running; `calls` makes one call of each."""

    def __init__(self, scene, pool):
        self.scene = scene
        self._pool = pool
        self.processes = []
        made = {
            kind: [pool.submit(self._start, kind, rank) for rank in range(ranks)]
            for kind, ranks in (("source", scene.source.world_size), ("destination", scene.plan.destination_ranks))
        }
        self.sources, self.destinations = ([each.result(60) for each in ranks] for ranks in made.values())

    def _start(self, kind, rank):
        process = _Process(ctx=multiprocessing.get_context("forkserver"))
        process.start()
        self.processes.append(process)
        return getattr(process, kind)(self.scene, rank)

    def replace_destination(self, rank):
        """Let another process be this rank."""
        self.destinations[rank] = self._start("destination", rank)

    def begin(self, ranks, method, *arguments):
        return [self._pool.submit(getattr(rank, method), *arguments) for rank in ranks]

    def call(self, ranks, method, *arguments):
        return [each.result(60) for each in self.begin(ranks, method, *arguments)]

    def rendezvous(self, key=None):
        scene = self.scene
        store = self.sources[0].store(scene.timeout_s) if TRANSPORTS[scene.transport].needs_store else None
        listeners = self.call(self.sources, "open")
        key = key or secrets.token_bytes(16)
        relay_listeners = self.call(self.destinations, "open")
        rendezvous = Rendezvous(
            scene.transport, key, listeners, store, len(self.destinations), scene.timeout_s, relay_listeners
        )
        return rendezvous if scene.transport in MAPPED.values() else replace(rendezvous, topology=scene.topology)

    def begin_connect(self, rendezvous=None):
        rendezvous = rendezvous or self.rendezvous()
        return self.begin(self.sources, "connect", rendezvous) + self.begin(self.destinations, "connect", rendezvous)

    def connect(self):
        for each in self.begin_connect():
            each.result(60)

    def begin_refit(self, version, with_checksum=True, delta=False):
        sending = self.begin(self.sources, "send", version, with_checksum, delta)
        return sending + self.begin(self.destinations, "receive", version)

    def refit(self, version, with_checksum=True, delta=False):
        return [each.result(60) for each in self.begin_refit(version, with_checksum, delta)]

    def bytes_of_refit(self, version, delta=False):
        """Fill the sources with a version, move it, see that it is there, and return the bytes that travelled."""
        self.call(self.sources, "fill", version)
        sent = self.refit(version, delta=delta)[: len(self.sources)]
        assert self.wrong(version) == [[]] * len(self.destinations)
        return sum(each.size_bytes for each in sent)

    def compare(self, version):
        """Parameters that differ on each destination."""
        calls = self.begin(self.sources, "send", version) + self.begin(self.destinations, "compare", version)
        return [each.result(60) for each in calls][len(self.sources) :]

    def wrong(self, version):
        return self.call(self.destinations, "wrong", version)

    def end(self):
        for process in self.processes:
            process._process.kill()
            process._process.join()


NO_END = "no end"


def failures(calls, timeout_s=60):
    """Error that each call raised, by type and message; "" where it did not, and `NO_END` where it goes on."""
    ended = wait(calls, timeout_s).done
    if len(ended) < len(calls):
        return [NO_END if call not in ended else "" for call in calls]
    errors = [call.exception() for call in calls]
    return [f"{type(error).__name__}: {error}" if error else "" for error in errors]
