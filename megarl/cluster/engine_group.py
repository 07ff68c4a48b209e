"""The engines as one object: requests are spread over them, and weights go to all of them."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple

import ray
import torch

from converters.architectures import Lora
from converters.errors import UserError
from converters.layout import Shape
from converters.layouts.traced_layout import LoadTrace
from converters.number_formats import NumberFormat, number_format
from megarl.cluster.asked import Asked, SoFar
from megarl.cluster.engine_handle import EngineHandle
from megarl.cluster.engine_load import load_metrics, work_metrics
from megarl.cluster.engine_starter import EngineStarter
from megarl.cluster.heartbeat import INTERVAL_S
from megarl.cluster.reservation import Seats
from megarl.cluster.restarts import Restarts, Start
from megarl.cluster.router import Router
from megarl.cluster.streams import results_of
from megarl.cluster.worker_group import Call, Worker, WorkerFailed, WorkerGone, WorkerGroup, wait
from megarl.data import Turn
from megarl.resharding.direct.connections import Address
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.weight_receiver import WeightReceiver
from megarl.rollout import engine_kind
from megarl.rollout.protocol import Engine, EngineMemory, KeysAndValues, PauseMode, Request
from megarl.schema import RolloutConfig
from megatron_ext.device_memory import CountedMemory

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

# Enough for events, requests, their end, a stream of tokens, an update and a question about health at the same time.
_CALLS_AT_ONCE = 6


@dataclass(frozen=True)
class SharedByEngines:
    """State that all engines of a run have in common, and any part of them."""

    restarts: Restarts
    router: Router
    number_format: NumberFormat | None = None
    """The one in which they hold the weights, if not as these are trained."""
    recomputed: list[int] = field(default_factory=list)
    """Tokens in flight that one computed anew as its prefix cache was reset, in this step."""


class Engines:
    """Engines that are alike. A request goes to one of them (`Router`), weights to all."""

    def __init__(self, handles: Sequence[EngineHandle], shared: SharedByEngines) -> None:
        self.handles = list(handles)
        self._shared, self._restarts, self._router = shared, shared.restarts, shared.router

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

    def wait_for_one(self) -> None:
        """Wait until one is up, or none can be as they are held off. Raises as `Restarts.begin`."""
        self.restart_dead()
        self._restarts.go_on()
        while not self.up and not self._restarts.is_held_off:
            self._restarts.wait()

    def wait_for_all(self) -> None:
        """Wait until all are up that were started anew. Raises as `Restarts.begin`."""
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
        """Begin to start those anew that are down; whether there are any. Raises as `Restarts.begin`."""
        dead = [handle for handle in self.handles if handle.state == "down"]
        for handle in dead:
            self._restarts.begin(handle)
        return bool(dead)

    def undisturbed(self) -> AbstractContextManager[object]:
        """Let nobody else begin or go on with a restart meanwhile; requests wait for their answers."""
        return self._restarts.lock

    def workers(self) -> list[Worker]:
        """The process that answers for each engine: another one after a restart."""
        return [handle.worker for handle in self.handles]

    def but(self, workers: Collection[Worker]) -> "Engines":
        """The engines for which others answer than these."""
        return self._those(handle for handle in self.handles if handle.worker not in workers)

    def begin(self, method: Callable[[Any, *Ts], R], *arguments: *Ts) -> list[Call[R]]:
        """Begin a call of a method of `Engine` in every engine."""
        return [handle.begin(method, *arguments) for handle in self.handles]

    def worker_nodes(self) -> list[str]:
        """The machine of every worker of every engine, in the order of their ranks in a transfer."""
        return list(chain.from_iterable(handle.worker_nodes for handle in self.handles))

    def rdma_ports(self) -> list[bool]:
        """Whether the machine of every worker of every engine has a port of InfiniBand, RoCE or EFA."""
        return list(chain.from_iterable(wait(self.begin(Engine.call_receivers, WeightReceiver.has_rdma_port))))

    def generate(self, requests: Sequence[Request]) -> list[list[Turn]]:
        """Samples of every request, in order."""
        answers = dict(self.generate_each(requests))
        return [answers[index] for index in range(len(requests))]

    def generate_each(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Turn]]]:
        """Each request's place and samples, as they are finished; all samples of a request are of one engine.

        Requests that an engine leaves unanswered when it dies go to the others, or to one that was started anew.
        """
        ended = SimpleQueue[tuple[int, Future[list[Turn]]]]()
        asked = self.begin_generate(requests)
        for place, each in enumerate(asked):
            each.answer.add_done_callback(lambda answer, place=place: ended.put((place, answer)))  # type: ignore[misc]
        try:
            for _ in asked:
                place, answer = self._first(ended)
                yield place, answer.result()
        finally:
            self._router.abandon(asked)

    def begin_generate(self, requests: Sequence[Request], so_far: Sequence[SoFar] = ()) -> list[Asked]:
        """Begin to sample all requests. Whoever waits for the answers calls `look_after` now and then.

        Where it is known what there is of each, `so_far`, they go on behind that.
        """
        return self._router.begin(requests, self.handles, so_far)

    def generate_in_each(self, requests: Sequence[Request]) -> list[list[list[Turn]]]:
        """Samples of all requests from every engine that serves, however much else it is asked for.

        One that dies meanwhile is left out and started anew.
        """
        serving = [handle for handle in self.handles if handle.state == "serving"]
        return self._answers(serving, Engine.generate, requests)

    def so_far(self, asked: Sequence[Asked]) -> list[SoFar]:
        """The turns that there are of each of these requests, also if it is answered."""
        return self._router.so_far(asked)

    def look_after(self) -> None:
        """Give weights to engines that were started anew and are up: the trainer's ranks have those of the others."""
        self._restarts.bring_back()

    def generate_stream(self, request: Request) -> Iterator[list[int]]:
        """The token ids of a request's one sample, as they are sampled."""
        with self._router.asking(request, self.handles) as handle:
            for _, token_ids in results_of([handle.stream(Engine.generate_stream, request)]):
                yield token_ids

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling; requests in flight are kept or come back as they are."""
        self._tell(Engine.pause, mode)

    def resume(self) -> None:
        """Sample on after `pause`."""
        self._tell(Engine.resume)

    def reset_prefix_cache(self) -> None:
        """Forget what was computed before, also of what is in flight."""
        self._shared.recomputed.extend(self._tell(Engine.reset_prefix_cache))

    def sleep(self) -> None:
        """Let the engines give the memory of weights and KV cache back; requests go on when they are awake.

        One that was about to start is waited for, and sleeps, too; one that has died leaves nothing.
        """
        self._restarts.hold_off()
        self._router.sleep(self.handles)
        self._tell(Engine.sleep)
        self.restart_dead()
        self._restarts.hold_off()

    def wake_up(self, parts: Collection[EngineMemory]) -> None:
        """Let the engines have these parts back. When all is awake, those that died may start."""
        self._tell(Engine.wake_up, sorted(parts))
        if "kv_cache" in parts:
            self._router.wake_up(self.handles)
            self._restarts.let_in()

    def begin_update(self, version: int, names: Sequence[str], timeout_s: float) -> None:
        """Fence all engines until `commit_update`."""
        wait([handle.begin_update(version, names) for handle in self.handles], timeout_s)

    def commit_update(self, version: int, timeout_s: float, kv: KeysAndValues = "recompute") -> int:
        """Lift the fence: from here on all engines serve `version`. Returns the tokens that they compute anew."""
        committing = [(handle, handle.begin(Engine.commit_update, version, kv)) for handle in self.handles]
        deadline, failures, recomputed = time.monotonic() + timeout_s, list[WorkerFailed](), 0
        for handle, call in committing:
            try:
                recomputed += sum(wait([call], max(0.0, deadline - time.monotonic())))
            except WorkerFailed as failure:
                # The others have their weights all the same, and are to be known for it.
                failures.append(failure)
            else:
                handle.committed(version)
                self._restarts.serves(handle)
        if failures:
            raise failures[0]
        return recomputed

    def trace_layouts(
        self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]
    ) -> list[list[LoadTrace]]:
        """Trace the layout of each engine's workers: where they keep the tensors of a HuggingFace checkpoint.

        Raises UserError for engines whose layout cannot be traced.
        """
        return wait(self.begin(Engine.trace_layout, dict(hf_shapes), dict(hf_dtypes)))

    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """Let every engine map the shared-memory segments of a refit."""
        wait(self.begin(Engine.map_segments, list(segments), segment_bytes))

    def open_transfer(self, spec: TransferSpec) -> list[Address]:
        """Prepare all workers of all engines to be written along `spec`; where their neighbours find them."""
        # By reference: it holds the traces of all workers.
        stored: Any = ray.put(spec)
        opening = [
            handle.worker.begin(Engine.call_receivers.__name__, WeightReceiver.open, stored, replica)
            for replica, handle in enumerate(self.handles)
        ]
        return list(chain.from_iterable(wait(opening)))

    def begin_connect(self, rendezvous: Rendezvous) -> list[Call[list[None]]]:
        """Begin to let all workers meet the trainer's ranks, and each other."""
        return self.begin(Engine.call_receivers, WeightReceiver.connect, rendezvous)

    def begin_compare(self, version: int) -> list[Call[list[set[str]]]]:
        """Begin to look, in every worker, which parameters would change if weights were received."""
        return self.begin(Engine.call_receivers, WeightReceiver.compare, version)

    def close_transfer(self) -> None:
        """Free what belongs to the transfer that was opened, if any."""
        wait(self.begin(Engine.call_receivers, WeightReceiver.close))

    def _first(self, ended: SimpleQueue[tuple[int, Future[list[Turn]]]]) -> tuple[int, Future[list[Turn]]]:
        while True:
            self.look_after()
            with suppress(Empty):
                return ended.get(timeout=INTERVAL_S)

    def _those(self, handles: Iterable[EngineHandle]) -> "Engines":
        return Engines(list(handles), self._shared)

    def _tell(self, method: Callable[[Any, *Ts], R], *arguments: *Ts) -> list[R]:
        """Call a method of the engines that are up."""
        return self._answers(self.up, method, *arguments)

    def _answers(self, handles: Sequence[EngineHandle], method: Callable[[Any, *Ts], R], *arguments: *Ts) -> list[R]:
        """Call a method of these; the results of those that do not die."""
        calls, results = [(handle, handle.begin(method, *arguments)) for handle in handles], list[R]()
        for handle, call in calls:
            try:
                results += wait([call])
            except WorkerFailed:
                if handle.is_up:
                    raise
                self._restarts.begin(handle)
        return results


class EngineGroup(Engines):
    """Engines, each in a process of its own. A context manager: they end with it."""

    def __init__(self, config: RolloutConfig, seats: Seats, logs: Path, restarts: int = 0) -> None:
        """Engines that die are started anew, at most `restarts` times in all."""
        kind = engine_kind(config.engine)
        nodes = kind.nodes(config.engine_args)
        self.processes = WorkerGroup(seats, logs, calls_at_once=_CALLS_AT_ONCE)
        workers = self.processes.workers
        at_once = kind.at_once(config.engine_args)
        handles = [EngineHandle(workers[start : start + nodes], at_once) for start in range(0, len(workers), nodes)]
        self._starter = EngineStarter(config, kind, self.processes)
        again = Restarts(restarts, Start(self._starter.prepare, self._starter.load), up_within_s=seats.timeout_s)
        shared = SharedByEngines(again, Router(handles, again), number_format(config.weights))
        super().__init__(handles, shared)
        self._step_began_s = time.monotonic()

    def __enter__(self) -> Self:
        self.processes.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # First of all: it starts anew what it finds dead.
        self._router.close()
        if kind is None:
            # One that is down, or just starting, has nothing that would not end with its process.
            wait([process.begin("close") for handle in self.up for process in handle.processes])
        self.processes.kill()

    def nodes(self) -> list[str]:
        """The machine of every process of the engines. Raises UserError if they are not up in time."""
        return self.processes.nodes()

    def begin_start(self, model_path: Path, *, load_weights: bool, adapter: Lora | None = None) -> list[Call[None]]:
        """Begin to start all engines; they are up when `wait_started` returns.

        Without `load_weights` their first weights come by a refit. With an `adapter` refits bring this alone.
        Raises UserError for a model that does not fit the number format of the engines, or the slot of an adapter.
        """
        self._starter.set_arguments(model_path, load_weights=load_weights, adapter=adapter)
        self.nodes()  # first of all there has to be room for them
        self._wait_beginning([call for handle in self.handles for call in self._starter.begin_make(handle)])
        return [call for handle in self.up for call in handle.begin_start()]

    def wait_started(self, calls: Sequence[Call[None]]) -> None:
        """Wait for what `begin_start` began. One whose process dies is started anew: raises as `Restarts.begin`.

        Raises UserError with the end of the log if an engine does not start.
        """
        try:
            self._wait_beginning(calls)
        except WorkerGone:
            raise  # whoever ended it, it was not the configuration
        except WorkerFailed as error:
            raise UserError(
                f"an engine did not start, check rollout.engine_args and model.path: {error.reason}", error.details
            ) from error
        self.wait_for_all()
        versions, parts = wait(self.begin(Engine.version)), wait(self.begin(Engine.worker_parts))
        for handle, version, worker_parts in zip(self.handles, versions, parts, strict=True):
            handle.started(version, worker_parts)

    def _wait_beginning(self, calls: Sequence[Call[None]]) -> None:
        """Wait for calls of engines that start; those of one that dies are left, and it is started anew."""
        while left := [call for call in calls if call.worker in self.processes.workers]:
            try:
                wait(left)
                return
            except WorkerGone:
                if not self.restart_dead():
                    raise

    def bring_back_with(self, give_weights: Callable[[], object]) -> None:
        """Let engines that were started anew have from `give_weights` all that refits bring, not from the folder."""
        self._starter.leave_weights_to_refits()
        self._restarts.give_weights = give_weights

    def count_memory(self, memory: CountedMemory) -> None:
        """Count what the engines hold, from now on, where there is no GPU to do it."""
        self._starter.memory = memory
        self._tell(Engine.count_memory, memory)

    def state_dict(self) -> dict[str, Any]:
        """The state of the engines in a checkpoint: their restarts."""
        return self._restarts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count restarts on from a checkpoint."""
        self._restarts.load_state_dict(state)

    def end_step(self) -> dict[str, float]:
        """Metrics of engines that died, or of what they had to sample, since the last step."""
        now_s = time.monotonic()
        seconds, self._step_began_s = now_s - self._step_began_s, now_s
        return {
            **self._restarts.end_step(),
            **load_metrics(self.handles),
            **work_metrics(self.handles, self._shared.recomputed, seconds),
            "engines/tokens_moved": float(self._router.take_moved()),
        }
