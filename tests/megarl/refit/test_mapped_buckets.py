"""Memory of a GPU that others map is freed when all have let go of it: CUDA leaves undefined what happens else.

Trainer and engines are threads here, and shared memory plays CUDA's runtime.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import RLock
from types import SimpleNamespace

import pytest
import ray
import torch
from played_cuda import play_cuda
from small_configs import make_config
from transfer_scenes import Scene, shard_of

from converters.layouts.parallel_sizes import ParallelSizes
from converters.layouts.traced_layout import LoadTrace, PackedTrace
from megarl.cluster.engines import engines as engines_module
from megarl.cluster.engines.engines import Engines, SharedByEngines
from megarl.cluster.trainer.trainer_worker import TrainerWorker
from megarl.cluster.trainer.weight_sender import WeightSender
from megarl.cluster.workers.worker import WorkerFailed
from megarl.refit import direct
from megarl.refit.direct import DirectPath
from megarl.refit.refit import Refit
from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.weight_receiver import WeightReceiver
from megarl.schema import RefitConfig
from megatron_ext import device

SCENE = Scene(make_config("qwen3"), ParallelSizes(world_size=1), workers=1, replicas=2, dtype=torch.float32)
LAYOUT = SCENE.plan.destination
TRAINER, ENGINES = "the trainer's machine", "the engines' machine"


class PlayedEngine:
    """An engine of one worker, and the handle of it."""

    def __init__(self, pool, node):
        self._pool, self.worker_nodes = pool, [node]
        self.is_up, self.state = True, "serving"
        self.dead = []
        self.restart()

    def restart(self):
        """Have a new process in the place of one that died, which maps nothing any more."""
        for each in self.dead:
            each.disconnect()
        self.parameters = {name: torch.zeros(shape) for name, shape in LAYOUT.local_shapes(0).items()}
        model = SimpleNamespace(loaded_parameters=lambda: self.parameters, after_direct_write=lambda: None)
        self.receiver, self.version, self.worker = WeightReceiver(model, 0), -1, SimpleNamespace(begin=self._begin)
        # With its process, what it gave to others ends without a call of CUDA's.
        self.dead.append(self.receiver)

    def begin(self, method, *arguments):
        return self._begin(method.__name__, *arguments)

    def begin_update(self, version, names):
        return self._pool.submit(lambda: None)

    def note_committed(self, version):
        self.version = version

    def _begin(self, name, *arguments):
        return self._pool.submit(getattr(self, f"_{name}"), *arguments)

    def _call_receivers(self, method, *arguments):
        return [method(self.receiver, *arguments)]

    def _trace_layout(self, shapes, dtypes):
        return [PackedTrace.of(LoadTrace(LAYOUT.shard(0), SCENE.dtypes[0], [], {}))]

    def _receive(self, version):
        self.receiver.receive(version)

    def _commit_update(self, version, kv):
        return 0


class PlayedRank:
    """The rank of the trainer, and the group of it."""

    def __init__(self, pool):
        self._pool, self.rank = pool, TrainerWorker(0)
        self.parameters = {name: tensor.clone() for name, tensor in shard_of(SCENE.plan.source, 0, 0).items()}
        self.rank.model = SimpleNamespace(
            local_tensors=lambda: self.parameters, complete_weights=lambda: None, trained_weights=nullcontext
        )
        self.rank.weight_dtypes = lambda: dict.fromkeys(SCENE.architecture.hf_shapes, torch.float32)

    def call(self, method, *arguments):
        return [each.result(60) for each in self.begin(method, *arguments)]

    def begin(self, method, *arguments, **named):
        return [self._pool.submit(getattr(self.rank, method.__name__), *arguments, **named)]

    def fill(self, version):
        for name, tensor in shard_of(SCENE.plan.source, 0, version).items():
            self.parameters[name].copy_(tensor)


def results(calls, *_, **__):
    return [call.result(60) for call in calls]


@pytest.fixture
def cuda(monkeypatch):
    """Played memory, of which each thread takes the others' for that of another process."""
    played = play_cuda(monkeypatch.setattr)
    played.maps_own = True
    monkeypatch.setattr(device, "backend", lambda: "nccl")
    monkeypatch.setattr(ray, "put", lambda value: value)
    for module, name in ((engines_module, "wait_in_refit"), (direct, "wait"), (direct, "wait_together")):
        monkeypatch.setattr(module, name, results)
    return played


@pytest.fixture(params=[TRAINER, ENGINES])
def run(cuda, request):
    """A rank, two engines that pass weights on to each other if they have a machine of their own, and their refit."""
    with ThreadPoolExecutor(16) as pool:
        rank = PlayedRank(pool)
        restarts = SimpleNamespace(
            lock=RLock(),
            begin=lambda handle: None,
            retry=lambda failure: False,
            advance=lambda: None,
            is_paused=False,
            note_serving=lambda handle: None,
        )
        router = SimpleNamespace(queue=SimpleNamespace(dispatch=lambda: None))
        handles = [PlayedEngine(pool, request.param) for _ in range(2)]
        engines = Engines(handles, SharedByEngines(restarts, router))
        trainer = SimpleNamespace(
            weights=WeightSender(rank),
            nodes=lambda: [TRAINER],
            parallel=SCENE.source,
            module_names="local",
            backend="nccl",
        )
        # Between machines without ports, it is by name alone that memory of a GPU is read.
        transport = "auto" if request.param == TRAINER else "rdma"
        config = RefitConfig(transport=transport, bucket_bytes=2**16, timeout_s=20.0)
        path = DirectPath(trainer, engines, SCENE.architecture, config)
        refit = Refit(trainer, engines, path, [], timeout_s=20.0)
        yield SimpleNamespace(rank=rank, handles=handles, refit=refit)
        refit._path.close()
        for each in (*handles[0].dead, *handles[1].dead):
            each.close()
        assert (cuda.opened, cuda.allocated, cuda.freed_while_open) == ({}, {}, [])


def check(run, version):
    expected = shard_of(LAYOUT, 0, version)
    for handle in run.handles:
        assert handle.version == version
        assert all(torch.equal(handle.parameters[name], tensor) for name, tensor in expected.items())


def test_an_engine_that_serves_has_let_go_when_another_one_catches_up(run, cuda):
    run.refit(0)
    assert cuda.opened
    check(run, 0)
    run.handles[1].restart()
    run.refit.catch_up()
    check(run, 0)
    assert cuda.freed_while_open == []
    run.rank.fill(1)
    run.refit(1)
    check(run, 1)


@pytest.mark.long
def test_after_a_failure_buckets_stay_until_all_have_let_go(run, cuda, tmp_path):
    run.refit(0)
    sending = run.rank.begin(TrainerWorker.send, 1)[0]
    # The second engine waits for another version, and the first one has not begun.
    with pytest.raises(TransferError, match="version 2 lacks"):
        run.handles[1].begin(WeightReceiver.receive, 2).result(60)
    with pytest.raises(TransferError):
        sending.result(60)
    assert cuda.freed_while_open == []
    run.refit._path.recover(WorkerFailed("the transfer failed", tmp_path / "log", TransferError()))
    run.rank.fill(1)
    run.refit(1)
    check(run, 1)
