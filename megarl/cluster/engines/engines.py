"""Some or all engines as one object: requests are distributed over them, and weights go to all."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

import ray
import torch

from converters.layout import Shape
from converters.layouts.traced_layout import PackedTrace
from converters.number_formats import NumberFormat
from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.engines.engine_heartbeats import INTERVAL_S
from megarl.cluster.engines.pending_request import PartialTurns, PendingRequest
from megarl.cluster.engines.restarts import Restarts
from megarl.cluster.engines.router import Router
from megarl.cluster.workers.calls import LONGEST_S, wait
from megarl.cluster.workers.streams import results_of
from megarl.cluster.workers.worker import Call, Worker, WorkerFailed
from megarl.data import Turn
from megarl.resharding.direct.connections import Address
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.weight_receiver import WeightReceiver
from megarl.rollout.protocol import Engine, EngineMemory, KeysAndValues, PauseMode, Request

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
REFIT_LIMIT = "refit.timeout_s"
"""The configuration key of an engine's time limit in a refit."""
_SILENCE_LIMIT = "cluster.silence_timeout_s"


@dataclass(frozen=True)
class SharedByEngines:
    """State shared by all engines of a run, and by every subset of them."""

    restarts: Restarts
    router: Router
    number_format: NumberFormat | None = None
    """The number format of the engines' weights; None if they hold them as trained."""


class Engines:
    """Equal engines: a request goes to one of them (`RequestQueue`), weights to all."""

    def __init__(self, handles: Sequence[EngineHandle], shared: SharedByEngines) -> None:
        self.handles = list(handles)
        self._shared, self._restarts = shared, shared.restarts
        self._router, self._queue = shared.router, shared.router.queue

    def __len__(self) -> int:
        return len(self.handles)

    def only(self, *numbers: int) -> "Engines":
        """A subset of the engines, to be given weights while the others serve."""
        return self._those(self.handles[number] for number in numbers)

    def with_version(self, version: int) -> "Engines":
        """The engines that have the weights of a version."""
        return self._those(handle for handle in self.up if handle.version == version)

    @property
    def up(self) -> list[EngineHandle]:
        """The engines that are up, as far as deaths are known."""
        return [handle for handle in self.handles if handle.is_up]

    @property
    def any_serving(self) -> bool:
        """Whether at least one serves, as far as deaths are known."""
        return any(handle.state == "serving" for handle in self.handles)

    def wait_for_one(self) -> None:
        """Wait until one is up, unless none can be because restarts are paused. Raises as `Restarts.begin`."""
        self.restart_dead()
        self._restarts.advance()
        while not self.up and not self._restarts.is_paused:
            self._restarts.wait()
            # Also begin restarts of engines found dead only now: while this thread is in a refit, no other thread does.
            self.restart_dead()

    def wait_for_all(self) -> None:
        """Wait until all restarted engines are up. Raises as `Restarts.begin`."""
        while len(self.up) < len(self):
            self._restarts.wait()

    def without_version(self, version: int) -> "Engines":
        """The engines that are up and have other weights or none. If none is up, wait for one if possible."""
        self.wait_for_one()
        return self._those(handle for handle in self.up if handle.version != version)

    @property
    def number_format(self) -> NumberFormat | None:
        """The number format of the engines' weights; None if they hold them as trained."""
        return self._shared.number_format

    def restart_dead(self) -> bool:
        """Begin to restart engines that are down; return whether there are any. Raises as `Restarts.begin`."""
        dead = [handle for handle in self.handles if handle.state == "down"]
        for handle in dead:
            self._restarts.begin(handle)
        return bool(dead)

    def retry_restart(self, failure: WorkerFailed) -> bool:
        """Restart again an engine that got this failure before it had weights; return whether there is one.

        Raises as `Restarts.begin`.
        """
        return self._restarts.retry(failure)

    def undisturbed(self) -> AbstractContextManager[object]:
        """Keep other threads from beginning or advancing a restart within the context; requests keep waiting."""
        return self._restarts.lock

    def workers(self) -> list[Worker]:
        """The process that answers for each engine; it changes with a restart."""
        return [handle.worker for handle in self.handles]

    def excluding(self, workers: Collection[Worker]) -> "Engines":
        """The engines whose answering process is not among `workers`."""
        return self._those(handle for handle in self.handles if handle.worker not in workers)

    def begin(self, method: Callable[[Any, *Ts], R], *arguments: *Ts) -> list[Call[R]]:
        """Begin a call of a method of `Engine` in every engine."""
        return [handle.begin(method, *arguments) for handle in self.handles]

    def worker_nodes(self) -> list[str]:
        """The machine of every worker of every engine, in the order of their ranks in a transfer."""
        return list(chain.from_iterable(handle.worker_nodes for handle in self.handles))

    def rdma_ports(self, timeout_s: float) -> list[bool]:
        """For each worker of each engine, whether its machine has an InfiniBand, RoCE or EFA port that is up."""
        asking = self.begin(Engine.call_receivers, WeightReceiver.has_rdma_port)
        return list(chain.from_iterable(wait_in_refit(asking, timeout_s)))

    def have_nixl(self, timeout_s: float) -> list[bool]:
        """For each worker of each engine, whether its environment has NIXL, which rdma needs."""
        asking = self.begin(Engine.call_receivers, WeightReceiver.has_nixl)
        return list(chain.from_iterable(wait_in_refit(asking, timeout_s)))

    def gpudirect_obstacles(self, timeout_s: float) -> list[str]:
        """For each worker, why GPUDirect does not work on its machine; empty if no obstacle is known."""
        asking = self.begin(Engine.call_receivers, WeightReceiver.gpudirect_obstacle)
        return list(chain.from_iterable(wait_in_refit(asking, timeout_s)))

    def generate(self, requests: Sequence[Request]) -> list[list[Turn]]:
        """Sample all requests; return their samples in order."""
        answers = dict(self.generate_each(requests))
        return [answers[index] for index in range(len(requests))]

    def generate_each(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Turn]]]:
        """Yield each request's index and samples as it finishes; all samples of a request come from one engine.

        Unanswered requests of an engine that dies go to other engines, or to a restarted one.
        """
        ended = SimpleQueue[tuple[int, Future[list[Turn]]]]()
        pending = self.begin_generate(requests)
        for place, each in enumerate(pending):
            each.answer.add_done_callback(lambda answer, place=place: ended.put((place, answer)))  # type: ignore[misc]
        try:
            for _ in pending:
                place, answer = self._first(ended)
                yield place, answer.result()
        finally:
            self._queue.abandon(pending)

    def begin_generate(
        self, requests: Sequence[Request], partial_turns: Sequence[PartialTurns] = ()
    ) -> list[PendingRequest]:
        """Begin to sample all requests. The caller must call `recover` regularly while it waits for the answers.

        `partial_turns` is what was already sampled for each request; sampling continues after it.
        """
        return self._router.begin(requests, self.handles, partial_turns)

    def generate_in_each(self, requests: Sequence[Request]) -> list[list[list[Turn]]]:
        """Sample all requests on every serving engine, even if it is full.

        An engine that dies meanwhile is left out and restarted.
        """
        serving = [handle for handle in self.handles if handle.state == "serving"]
        return self._call(serving, Engine.generate, requests)

    def partial_turns(self, pending: Sequence[PendingRequest]) -> list[PartialTurns]:
        """The turns sampled so far for each request, answered or not."""
        return self._queue.partial_turns(pending)

    def recover(self) -> None:
        """Give weights to restarted engines that are up; the trainer's ranks must hold the others' version."""
        self._restarts.recover()

    def generate_stream(self, request: Request) -> Iterator[list[int]]:
        """Yield the token ids of a request's single sample as they are sampled."""
        with self._queue.asking(request, self.handles) as handle:
            for _, token_ids in results_of([handle.stream(Engine.generate_stream, request)]):
                yield token_ids

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling; requests in flight are kept, or end with their tokens so far."""
        self._call(self.up, Engine.pause, mode)

    def resume(self) -> None:
        """Resume sampling after `pause`."""
        self._call(self.up, Engine.resume)

    def sleep(self) -> None:
        """Let the engines free the memory of weights and KV cache; requests continue when they are awake.

        Waits for engines that are about to start, which then sleep, too, and until dead ones have left nothing.
        """
        self._restarts.pause()
        self._queue.sleep(self.handles)
        self._call_in_time(Engine.sleep)
        self.restart_dead()
        self._restarts.pause()

    def wake_up(self, parts: Collection[EngineMemory]) -> None:
        """Let the engines restore these parts. Once everything is awake, dead engines may start again."""
        self._call_in_time(Engine.wake_up, sorted(parts))
        if "kv_cache" in parts:
            self._queue.wake_up(self.handles)
            self._restarts.resume()

    def begin_update(self, version: int, names: Sequence[str], timeout_s: float) -> None:
        """Fence all engines until `commit_update`: they serve nothing."""
        # Passed by reference: a large model has tens of thousands of names.
        stored: Any = ray.put(list(names))
        wait_in_refit([handle.begin_update(version, stored) for handle in self.handles], timeout_s)

    def commit_update(self, version: int, timeout_s: float, kv: KeysAndValues = "recompute") -> int:
        """Lift the fence: from here on all engines serve `version`. Returns the tokens that they recompute."""
        committing = [(handle, handle.begin(Engine.commit_update, version, kv)) for handle in self.handles]
        began_s, failures, recomputed = time.monotonic(), list[WorkerFailed](), 0
        for handle, call in committing:
            try:
                recomputed += sum(wait_in_refit([call], timeout_s, since_s=began_s))
            except WorkerFailed as failure:
                # Go on: the other engines have committed, which must be recorded.
                failures.append(failure)
            else:
                handle.note_committed(version)
                self._restarts.note_serving(handle)
        self._queue.dispatch()
        if failures:
            raise failures[0]
        return recomputed

    def trace_layouts(
        self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype], timeout_s: float
    ) -> list[list[PackedTrace]]:
        """Trace the layout of each engine's workers: where they keep the tensors of a HuggingFace checkpoint.

        Raises UserError for engines whose layout cannot be traced.
        """
        return wait_in_refit(self.begin(Engine.trace_layout, dict(hf_shapes), dict(hf_dtypes)), timeout_s)

    def map_segments(self, segments: Sequence[str], segment_bytes: int, timeout_s: float) -> None:
        """Make every engine map the shared-memory segments of a refit."""
        wait_in_refit(self.begin(Engine.map_segments, list(segments), segment_bytes), timeout_s)

    def open_transfer(self, spec: TransferSpec, timeout_s: float) -> list[Address]:
        """Prepare all workers for the transfer of `spec`; return the addresses for their neighbours."""
        # Passed by reference: it holds the traces of all workers.
        stored: Any = ray.put(spec)
        opening = [
            handle.begin(Engine.call_receivers, WeightReceiver.open, stored, replica)
            for replica, handle in enumerate(self.handles)
        ]
        return list(chain.from_iterable(wait_in_refit(opening, timeout_s)))

    def begin_connect(self, rendezvous: Rendezvous) -> list[Call[list[None]]]:
        """Begin to connect all workers to the trainer's ranks, and to each other."""
        return self.begin(Engine.call_receivers, WeightReceiver.connect, rendezvous)

    def begin_compare(self, version: int) -> list[Call[list[set[str]]]]:
        """Begin to compare, in every worker, which parameters a receive would change."""
        return self.begin(Engine.call_receivers, WeightReceiver.compare, version)

    def disconnect_transfer(self, timeout_s: float) -> None:
        """Make workers of all engines that are up release the ranks' and neighbours' memory of a transfer, if any."""
        disconnecting = [handle.begin(Engine.call_receivers, WeightReceiver.disconnect) for handle in self.up]
        wait_in_refit(disconnecting, timeout_s)

    def close_transfer(self, timeout_s: float) -> None:
        """Free the memory of the open transfer, if any, after `disconnect_transfer`."""
        wait_in_refit(self.begin(Engine.call_receivers, WeightReceiver.close), timeout_s)

    def _first(self, ended: SimpleQueue[tuple[int, Future[list[Turn]]]]) -> tuple[int, Future[list[Turn]]]:
        while True:
            self.recover()
            with suppress(Empty):
                return ended.get(timeout=INTERVAL_S)

    def _those(self, handles: Iterable[EngineHandle]) -> "Engines":
        return Engines(list(handles), self._shared)

    def _call(self, handles: Sequence[EngineHandle], method: Callable[[Engine, *Ts], R], *arguments: *Ts) -> list[R]:
        """Call a method of these engines; return the results of those that do not die."""
        calls = [(each, each.begin(method, *arguments)) for each in handles]
        return [result for _, result in self._wait_for_survivors(calls)]

    def _call_in_time(self, method: Callable[[Engine, *Ts], object], *arguments: *Ts) -> None:
        """Call a method of all engines that are up; those that do not answer within the limit of silence count as dead.

        In a refit no heartbeats watch over them.
        """
        calls = [(each, each.begin(method, *arguments)) for each in self.up]
        self._wait_for_survivors(calls, self.handles[0].worker.silence_s, _SILENCE_LIMIT)

    def _wait_for_survivors(
        self, calls: Sequence[tuple[EngineHandle, Call[R]]], timeout_s: float = LONGEST_S, key: str = ""
    ) -> list[tuple[Worker, R]]:
        """Wait for calls of engine processes, as `wait`; return the results of those that do not die."""
        results, began_s = list[tuple[Worker, R]](), time.monotonic()
        for handle, call in calls:
            try:
                results += ((call.worker, result) for result in wait([call], timeout_s, key, since_s=began_s))
            except WorkerFailed as failure:
                if not handle.is_up:
                    self._restarts.begin(handle)
                elif not self.retry_restart(failure):
                    raise
        return results


def wait_in_refit(calls: Sequence[Call[R]], timeout_s: float, *, since_s: float | None = None) -> list[R]:
    """Wait, as `wait`, for calls in a refit that depend on no other process: a silent engine counts as dead."""
    return wait(calls, timeout_s, REFIT_LIMIT, since_s=since_s)
