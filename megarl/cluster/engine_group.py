"""The engines as one object: requests are spread over them, and weights go to all of them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple

import ray
import torch

from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json
from converters.layout import Shape
from converters.layouts.traced_layout import LoadTrace
from converters.number_formats import NumberFormat, number_format
from megarl.cluster.engine_handle import EngineHandle
from megarl.cluster.reservation import Seats
from megarl.cluster.worker_group import Call, WorkerFailed, WorkerGroup, results_of, wait
from megarl.data import Turn
from megarl.resharding.direct.connections import Address
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.weight_receiver import WeightReceiver
from megarl.rollout import engine_kind
from megarl.rollout.kind import Arguments
from megarl.rollout.number_format import in_number_format
from megarl.rollout.protocol import Engine, EngineMemory, PauseMode, Request
from megarl.schema import RolloutConfig
from megatron_ext.device_memory import CountedMemory

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

# Enough for a generation, an update and a question about health at the same time.
_CALLS_AT_ONCE = 4


class Engines:
    """Engines that are alike. Requests go to the least loaded that serves, weights to all."""

    def __init__(
        self,
        handles: Sequence[EngineHandle],
        routing: "Lock | None" = None,
        number_format: NumberFormat | None = None,
    ) -> None:
        """`number_format` is the one in which they hold the weights, if not as these are trained."""
        self.handles = list(handles)
        self.number_format = number_format
        self._routing = routing or Lock()

    def __len__(self) -> int:
        return len(self.handles)

    def only(self, *numbers: int) -> "Engines":
        """Some of the engines, to be given weights while the others serve."""
        return Engines([self.handles[number] for number in numbers], self._routing, self.number_format)

    def begin(self, method: Callable[[Any, *Ts], R], *arguments: *Ts) -> list[Call[R]]:
        """Begin a call of a method of `Engine` in every engine."""
        return [handle.begin(method, *arguments) for handle in self.handles]

    def worker_nodes(self) -> list[str]:
        """The machine of every worker of every engine, in the order of their ranks in a transfer."""
        return list(chain.from_iterable(handle.worker_nodes for handle in self.handles))

    def generate(self, requests: Sequence[Request]) -> list[list[Turn]]:
        """Samples of every request, in order."""
        answers = dict(self.generate_each(requests))
        return [answers[index] for index in range(len(requests))]

    def generate_each(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Turn]]]:
        """Each request's place and samples, as they are finished; all samples of a request are of one engine."""
        shares = self._route(requests)
        streams = {
            handle.stream(Engine.generate_each, [requests[place] for place in places]): handle
            for handle, places in shares.items()
        }
        left = {place: handle for handle, places in shares.items() for place in places}
        try:
            for stream, (index, turns) in results_of(streams):
                place = shares[streams[stream]][index]
                self._add_load(left.pop(place), -requests[place].sampling.samples)
                yield place, turns
        finally:
            for place, handle in left.items():
                self._add_load(handle, -requests[place].sampling.samples)

    def generate_stream(self, request: Request) -> Iterator[list[int]]:
        """The token ids of a request's one sample, as they are sampled."""
        (handle,) = self._route([request])
        try:
            for _, token_ids in results_of([handle.stream(Engine.generate_stream, request)]):
                yield token_ids
        finally:
            self._add_load(handle, -request.sampling.samples)

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling; requests in flight are kept or come back as they are."""
        wait(self.begin(Engine.pause, mode))

    def resume(self) -> None:
        """Sample on after `pause`."""
        wait(self.begin(Engine.resume))

    def reset_prefix_cache(self) -> None:
        """Forget what was computed for earlier prompts."""
        wait(self.begin(Engine.reset_prefix_cache))

    def sleep(self) -> None:
        """Let the engines give the memory of weights and KV cache back."""
        wait(self.begin(Engine.sleep))

    def wake_up(self, parts: Collection[EngineMemory]) -> None:
        """Let the engines have these parts back."""
        wait(self.begin(Engine.wake_up, sorted(parts)))

    def count_memory(self, memory: CountedMemory) -> None:
        """Count what the engines hold, from now on, where there is no GPU to do it."""
        wait(self.begin(Engine.count_memory, memory))

    def begin_update(self, version: int, names: Sequence[str], timeout_s: float) -> None:
        """Fence all engines until `commit_update`."""
        wait([handle.begin_update(version, names) for handle in self.handles], timeout_s)

    def commit_update(self, version: int, timeout_s: float) -> None:
        """Lift the fence: from here on all engines serve `version`."""
        wait(self.begin(Engine.commit_update, version), timeout_s)
        for handle in self.handles:
            handle.committed(version)

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

    def _route(self, requests: Sequence[Request]) -> dict[EngineHandle, list[int]]:
        """The places of the requests that each engine gets.

        It depends on the loads alone, so that engines that were idle get the same requests whenever they are asked.
        """
        shares: dict[EngineHandle, list[int]] = {}
        with self._routing:
            serving = [handle for handle in self.handles if handle.state == "serving"]
            for place, request in enumerate(requests):
                # Where none serves, requests wait for the end of an update, and a failure says what it was.
                handle = min(serving or self.handles, key=lambda each: each.load)
                handle.load += request.sampling.samples
                shares.setdefault(handle, []).append(place)
        return shares

    def _add_load(self, handle: EngineHandle, samples: int) -> None:
        with self._routing:
            handle.load += samples


class EngineGroup(Engines):
    """Engines, each in a process of its own. A context manager: they end with it."""

    def __init__(self, config: RolloutConfig, seats: Seats, logs: Path) -> None:
        self._config = config
        self._kind = engine_kind(config.engine)
        nodes = self._kind.nodes(config.engine_args)
        self.processes = WorkerGroup(seats, logs, calls_at_once=_CALLS_AT_ONCE)
        workers = self.processes.workers
        handles = [EngineHandle(workers[start : start + nodes]) for start in range(0, len(workers), nodes)]
        super().__init__(handles, number_format=number_format(config.weights))

    def __enter__(self) -> Self:
        self.processes.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.processes.__exit__(kind, error, trace)

    def nodes(self) -> list[str]:
        """The machine of every process of the engines. Raises UserError if they are not up in time."""
        return self.processes.nodes()

    def begin_start(self, model_path: Path, *, load_weights: bool) -> list[Call[None]]:
        """Begin to start all engines; they are up when `wait_started` returns.

        Without `load_weights` their first weights come by a refit. Raises UserError for a model that does not fit the
        number format of the engines.
        """
        given = self._arguments(model_path)
        arguments = given if load_weights else {**given, **self._kind.without_weights}
        # First of all there has to be room for them.
        self.nodes()
        making = [handle.begin_make(self._kind, model_path, arguments) for handle in self.handles]
        wait(list(chain.from_iterable(making)))
        return list(chain.from_iterable(handle.begin_start() for handle in self.handles))

    def _arguments(self, model_path: Path) -> Arguments:
        if self.number_format is None:
            return self._config.engine_args
        return in_number_format(self._config, read_json(model_path / CONFIG))

    def wait_started(self, calls: Sequence[Call[None]]) -> None:
        """Wait for what `begin_start` began. Raises UserError with the end of the log if an engine does not start."""
        try:
            wait(calls)
        except WorkerFailed as error:
            raise UserError(
                f"an engine did not start, check rollout.engine_args and model.path: {error.reason}", error.details
            ) from error
        versions, parts = wait(self.begin(Engine.version)), wait(self.begin(Engine.worker_parts))
        for handle, version, worker_parts in zip(self.handles, versions, parts, strict=True):
            handle.started(version, worker_parts)
