"""Some engines, or all of them, as one object: requests are spread over them, and weights go to all."""

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
"""The key of the time in which an engine answers in a refit."""
_SILENCE_LIMIT = "cluster.silence_timeout_s"


@dataclass(frozen=True)
class SharedByEngines:
    """State that all engines of a run have in common, and any part of them."""

    restarts: Restarts
    router: Router
    number_format: NumberFormat | None = None
    """The one in which they hold the weights, if not as these are trained."""


class Engines:
    """Engines that are alike. A request goes to one of them (`RequestQueue`), weights to all."""

    def __init__(self, handles: Sequence[EngineHandle], shared: SharedByEngines) -> None:
        self.handles = list(handles)
        self._shared, self._restarts = shared, shared.restarts
        self._router, self._queue = shared.router, shared.router.queue

    def __len__(self) -> int:
        return len(self.handles)

    def only(self, *numbers: int) -> "Engines":
        """Some of the engines, to be given weights while the others serve."""
        return self._those(self.handles[number] for number in numbers)

    def with_version(self, version: int) -> "Engines":
        """The engines that have the weights of a version."""
        return self._those(handle for handle in self.up if handle.version == version)

    @property
    def up(self) -> list[EngineHandle]:
        """The engines that are up, as far as deaths were heard of."""
        return [handle for handle in self.handles if handle.is_up]

    @property
    def any_serving(self) -> bool:
        """Whether one of them serves, as far as deaths were heard of."""
        return any(handle.state == "serving" for handle in self.handles)

    def wait_for_one(self) -> None:
        """Wait until one is up, or none can be as restarts are paused. Raises as `Restarts.begin`."""
        self.restart_dead()
        self._restarts.advance()
        while not self.up and not self._restarts.is_paused:
            self._restarts.wait()
            # One whose death is known only now, too: while this thread waits in a refit, nobody else begins.
            self.restart_dead()

    def wait_for_all(self) -> None:
        """Wait until all are up that were restarted. Raises as `Restarts.begin`."""
        while len(self.up) < len(self):
            self._restarts.wait()

    def without_version(self, version: int) -> "Engines":
        """The engines that are up and have other weights, or none. Where none is up, one is waited for if it can be."""
        self.wait_for_one()
        return self._those(handle for handle in self.up if handle.version != version)

    @property
    def number_format(self) -> NumberFormat | None:
        """The one in which they hold the weights, if not as these are trained."""
        return self._shared.number_format

    def restart_dead(self) -> bool:
        """Begin to restart those that are down; whether there are any. Raises as `Restarts.begin`."""
        dead = [handle for handle in self.handles if handle.state == "down"]
        for handle in dead:
            self._restarts.begin(handle)
        return bool(dead)

    def retry_restart(self, failure: WorkerFailed) -> bool:
        """Start an engine anew that has no weights since its restart and met this failure; whether there is one.

        Raises as `Restarts.begin`.
        """
        return self._restarts.retry(failure)

    def undisturbed(self) -> AbstractContextManager[object]:
        """Let nobody else begin or go on with a restart meanwhile; requests wait for their answers."""
        return self._restarts.lock

    def workers(self) -> list[Worker]:
        """The process that answers for each engine: another one after a restart."""
        return [handle.worker for handle in self.handles]

    def excluding(self, workers: Collection[Worker]) -> "Engines":
        """The engines for which others answer than these."""
        return self._those(handle for handle in self.handles if handle.worker not in workers)

    def begin(self, method: Callable[[Any, *Ts], R], *arguments: *Ts) -> list[Call[R]]:
        """Begin a call of a method of `Engine` in every engine."""
        return [handle.begin(method, *arguments) for handle in self.handles]

    def worker_nodes(self) -> list[str]:
        """The machine of every worker of every engine, in the order of their ranks in a transfer."""
        return list(chain.from_iterable(handle.worker_nodes for handle in self.handles))

    def rdma_ports(self, timeout_s: float) -> list[bool]:
        """Whether the machine of every worker of every engine has a port of InfiniBand, RoCE or EFA that is up."""
        asking = self.begin(Engine.call_receivers, WeightReceiver.has_rdma_port)
        return list(chain.from_iterable(wait_in_refit(asking, timeout_s)))

    def have_nixl(self, timeout_s: float) -> list[bool]:
        """Whether the environment of every worker of every engine has what rdma needs."""
        asking = self.begin(Engine.call_receivers, WeightReceiver.has_nixl)
        return list(chain.from_iterable(wait_in_refit(asking, timeout_s)))

    def gpudirect_obstacles(self, timeout_s: float) -> list[str]:
        """Why network cards do not reach the memory of each worker's GPU; empty where no obstacle is known."""
        asking = self.begin(Engine.call_receivers, WeightReceiver.gpudirect_obstacle)
        return list(chain.from_iterable(wait_in_refit(asking, timeout_s)))

    def generate(self, requests: Sequence[Request]) -> list[list[Turn]]:
        """Samples of every request, in order."""
        answers = dict(self.generate_each(requests))
        return [answers[index] for index in range(len(requests))]

    def generate_each(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Turn]]]:
        """Each request's place and samples, as they are finished; all samples of a request are of one engine.

        Requests that an engine leaves unanswered when it dies go to the others, or to one that was restarted.
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
        """Begin to sample all requests. Whoever waits for the answers calls `recover` now and then.

        `partial_turns` is what was already sampled for each request; sampling continues after it.
        """
        return self._router.begin(requests, self.handles, partial_turns)

    def generate_in_each(self, requests: Sequence[Request]) -> list[list[list[Turn]]]:
        """Samples of all requests from every engine that serves, however much else it is asked for.

        One that dies meanwhile is left out and restarted.
        """
        serving = [handle for handle in self.handles if handle.state == "serving"]
        return self._call(serving, Engine.generate, requests)

    def partial_turns(self, pending: Sequence[PendingRequest]) -> list[PartialTurns]:
        """The turns sampled so far for each request, answered or not."""
        return self._queue.partial_turns(pending)

    def recover(self) -> None:
        """Give weights to engines that were restarted and are up: the trainer's ranks have those of the others."""
        self._restarts.recover()

    def generate_stream(self, request: Request) -> Iterator[list[int]]:
        """The token ids of a request's one sample, as they are sampled."""
        with self._queue.asking(request, self.handles) as handle:
            for _, token_ids in results_of([handle.stream(Engine.generate_stream, request)]):
                yield token_ids

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling; requests in flight are kept or come back as they are."""
        self._call(self.up, Engine.pause, mode)

    def resume(self) -> None:
        """Sample on after `pause`."""
        self._call(self.up, Engine.resume)

    def sleep(self) -> None:
        """Let the engines give the memory of weights and KV cache back; requests go on when they are awake.

        One that was about to start is waited for, and sleeps, too; one that has died leaves nothing.
        """
        self._restarts.pause()
        self._queue.sleep(self.handles)
        self._call_in_time(Engine.sleep)
        self.restart_dead()
        self._restarts.pause()

    def wake_up(self, parts: Collection[EngineMemory]) -> None:
        """Let the engines have these parts back. When all is awake, those that died may start."""
        self._call_in_time(Engine.wake_up, sorted(parts))
        if "kv_cache" in parts:
            self._queue.wake_up(self.handles)
            self._restarts.resume()

    def begin_update(self, version: int, names: Sequence[str], timeout_s: float) -> None:
        """Fence all engines until `commit_update`."""
        # By reference: of a large model there are tens of thousands.
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
                # The others have their weights all the same, and are to be known for it.
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
        """Let every engine map the shared-memory segments of a refit."""
        wait_in_refit(self.begin(Engine.map_segments, list(segments), segment_bytes), timeout_s)

    def open_transfer(self, spec: TransferSpec, timeout_s: float) -> list[Address]:
        """Prepare all workers of all engines to be written along `spec`; where their neighbours find them."""
        # By reference: it holds the traces of all workers.
        stored: Any = ray.put(spec)
        opening = [
            handle.begin(Engine.call_receivers, WeightReceiver.open, stored, replica)
            for replica, handle in enumerate(self.handles)
        ]
        return list(chain.from_iterable(wait_in_refit(opening, timeout_s)))

    def begin_connect(self, rendezvous: Rendezvous) -> list[Call[list[None]]]:
        """Begin to let all workers meet the trainer's ranks, and each other."""
        return self.begin(Engine.call_receivers, WeightReceiver.connect, rendezvous)

    def begin_compare(self, version: int) -> list[Call[list[set[str]]]]:
        """Begin to look, in every worker, which parameters would change if weights were received."""
        return self.begin(Engine.call_receivers, WeightReceiver.compare, version)

    def disconnect_transfer(self, timeout_s: float) -> None:
        """Let the workers of all that are up let go of what ranks and neighbours gave them for a transfer, if any."""
        disconnecting = [handle.begin(Engine.call_receivers, WeightReceiver.disconnect) for handle in self.up]
        wait_in_refit(disconnecting, timeout_s)

    def close_transfer(self, timeout_s: float) -> None:
        """Free what belongs to the transfer that was opened, if any, after `disconnect_transfer`."""
        wait_in_refit(self.begin(Engine.call_receivers, WeightReceiver.close), timeout_s)

    def _first(self, ended: SimpleQueue[tuple[int, Future[list[Turn]]]]) -> tuple[int, Future[list[Turn]]]:
        while True:
            self.recover()
            with suppress(Empty):
                return ended.get(timeout=INTERVAL_S)

    def _those(self, handles: Iterable[EngineHandle]) -> "Engines":
        return Engines(list(handles), self._shared)

    def _call(self, handles: Sequence[EngineHandle], method: Callable[[Engine, *Ts], R], *arguments: *Ts) -> list[R]:
        """Call a method of these; the results of those that do not die."""
        calls = [(each, each.begin(method, *arguments)) for each in handles]
        return [result for _, result in self._wait_for_survivors(calls)]

    def _call_in_time(self, method: Callable[[Engine, *Ts], object], *arguments: *Ts) -> None:
        """Call a method of all that are up; those that do not answer for as long as they may be silent have died.

        In a refit nobody else asks them between two steps meanwhile.
        """
        calls = [(each, each.begin(method, *arguments)) for each in self.up]
        self._wait_for_survivors(calls, self.handles[0].worker.silence_s, _SILENCE_LIMIT)

    def _wait_for_survivors(
        self, calls: Sequence[tuple[EngineHandle, Call[R]]], timeout_s: float = LONGEST_S, key: str = ""
    ) -> list[tuple[Worker, R]]:
        """Wait for calls of processes of engines, as `wait`; the results of those that do not die."""
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
    """Wait, as `wait`, for calls of engines that need nobody else in a refit: one that does not answer has died."""
    return wait(calls, timeout_s, REFIT_LIMIT, since_s=since_s)
