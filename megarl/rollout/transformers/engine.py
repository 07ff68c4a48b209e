"""HuggingFace transformers as an engine: a model of this process, owned and stepped by one thread."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, TypeVarTuple, get_args

import torch
from torch import Tensor

from converters.errors import UserError
from converters.layout import Shape
from converters.layouts.traced_layout import LoadTrace
from megarl.data import Turn
from megarl.resharding.direct.weight_receiver import WeightReceiver
from megarl.resharding.loader.buckets import Bucket, views
from megarl.resharding.shared_memory import map_segment
from megarl.rollout.protocol import EngineDiedError, EngineMemory, PauseMode, Request, UpdateError
from megarl.rollout.request_in_flight import Listener
from megarl.rollout.text import Texts
from megarl.rollout.transformers.arguments import read_arguments
from megarl.rollout.update import WeightUpdate
from megarl.rollout.worker_memory import WorkerMemory, require
from megatron_ext import device
from megatron_ext.device_memory import CountedMemory

if TYPE_CHECKING:
    from megarl.rollout.transformers.batches import Batches
    from megarl.rollout.transformers.weights import ModelWeights

R = TypeVar("R")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")


def _by_owner(
    method: "Callable[Concatenate[TransformersEngine, P], R]",
) -> "Callable[Concatenate[TransformersEngine, P], R]":
    """Let a method run in the thread that owns the model, behind what was asked before; a dead engine runs none."""

    @functools.wraps(method)
    def call(self: "TransformersEngine", *arguments: P.args, **options: P.kwargs) -> R:
        def task() -> R:
            self._check_alive()
            return method(self, *arguments, **options)

        return self._owner.submit(task).result()

    return call


class TransformersEngine:
    """See `megarl.rollout.protocol.Engine`. `engine_args` are fields of `TransformersArguments`.

    One thread owns the model: every call from outside and every step is a task in its queue, so they never overlap and
    no lock is needed. A step puts the next one at the end of the queue, behind the calls that wait.
    """

    def __init__(self, model_path: Path | str, engine_args: Mapping[str, Any]) -> None:
        self._model_path = Path(model_path)
        self._texts = Texts(self._model_path)
        self._engine_args = dict(engine_args)
        self._owner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transformers")
        self._batches: Batches
        self._weights: ModelWeights
        self._memory: WorkerMemory
        self._away: frozenset[EngineMemory] = frozenset()
        self._receiver: WeightReceiver
        self._segments: list[Tensor] = []
        self._started = False
        self._version = -1
        self._update: WeightUpdate | None = None
        self._paused = False
        self._step_queued = False
        self._death: BaseException | None = None

    @_by_owner
    def start(self) -> None:
        """See `Generator.start`."""
        arguments = read_arguments(self._engine_args)
        from megarl.rollout.transformers.batches import Batches
        from megarl.rollout.transformers.model import SamplingModel
        from megarl.rollout.transformers.weights import ModelWeights

        device.multiply_by_onednn()
        model = SamplingModel(self._model_path, arguments)
        self._weights = ModelWeights(model.module)
        self._memory = WorkerMemory(model.module)
        self._receiver = WeightReceiver(self._weights, worker=0)
        self._batches = Batches(model, arguments.max_num_seqs)
        self._version = -1 if arguments.load_format == "dummy" else 0
        self._started = True

    def generate(self, requests: Sequence[Request]) -> list[list[Turn]]:
        """See `Generator.generate`."""
        return [future.result() for future in self._add(requests)]

    def generate_each(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Turn]]]:
        """See `Generator.generate_each`."""
        place = {future: index for index, future in enumerate(self._add(requests))}
        for future in as_completed(place):
            yield place[future], self._texts.added(future.result())

    def generate_stream(self, request: Request) -> Iterator[list[int]]:
        """See `Generator.generate_stream`."""
        if request.sampling.samples != 1:
            raise UserError(f"a stream of {request.sampling.samples} samples: ask for one")
        pieces = SimpleQueue[list[int] | None]()
        (future,) = self._add([request], pieces.put)
        future.add_done_callback(lambda _: pieces.put(None))
        while (piece := pieces.get()) is not None:  # not `yield from`: Ray sends to what this gives
            yield piece
        future.result()

    @_by_owner
    def pause(self, mode: PauseMode) -> None:
        """See `Generator.pause`."""
        self._paused = True
        if mode == "abort":
            self._batches.abort()

    @_by_owner
    def resume(self) -> None:
        """See `Generator.resume`."""
        self._paused = False
        self._queue_step()

    @_by_owner
    def version(self) -> int:
        """See `Generator.version`."""
        return self._version

    @_by_owner
    def reset_prefix_cache(self) -> None:
        """See `Generator.reset_prefix_cache`."""
        self._batches.forget()

    def close(self) -> None:
        """See `Generator.close`."""
        self._owner.submit(self._close).result()

    @_by_owner
    def trace_layout(self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> list[LoadTrace]:
        """See `LayoutSource.trace_layout`."""
        require(self._away, "weights")
        return [self._weights.trace(hf_shapes, hf_dtypes)]

    @_by_owner
    def worker_parts(self) -> list[int]:
        """See `LayoutSource.worker_parts`."""
        return [0]

    @_by_owner
    def sleep(self) -> None:
        """See `Sleeper.sleep`. Keys and values are of requests, and end with them."""
        self._batches.abort()
        self._memory.sleep()
        self._away = frozenset(get_args(EngineMemory))

    @_by_owner
    def wake_up(self, parts: Sequence[EngineMemory]) -> None:
        """See `Sleeper.wake_up`."""
        self._memory.wake_up(parts)
        self._away -= frozenset(parts)

    @_by_owner
    def count_memory(self, memory: CountedMemory) -> None:
        """See `Sleeper.count_memory`."""
        self._memory.count_in(memory)

    @_by_owner
    def begin_update(self, version: int, names: Sequence[str]) -> None:
        """See `WeightTarget.begin_update`."""
        if self._update is not None and not self._update.failed and self._update.version != version:
            raise UpdateError(f"update {version} cannot begin before {self._update.version} was committed")
        if version <= self._version:
            raise UpdateError(f"update {version} is not newer than the weights of version {self._version}")
        self._update = WeightUpdate(version, names)

    @_by_owner
    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """See `WeightTarget.map_segments`."""
        self._segments = [map_segment(segment, segment_bytes) for segment in segments]

    @_by_owner
    def write(self, bucket: Bucket) -> None:
        """See `WeightTarget.write`."""
        require(self._away, "weights")
        update = self._update_under_way("write")
        update.failed = True
        update.accept(entry.name for entry in bucket.entries)
        self._weights.load(views(bucket, self._segments[bucket.segment]).items())
        device.synchronize()
        update.failed = False

    @_by_owner
    def call_receivers(self, method: Callable[[WeightReceiver, *Ts], R], *arguments: *Ts) -> list[R]:
        """See `WeightTarget.call_receivers`."""
        require(self._away, "weights")
        return [method(self._receiver, *arguments)]

    @_by_owner
    def receive(self, version: int) -> None:
        """See `WeightTarget.receive`."""
        require(self._away, "weights")
        update = self._update_under_way("receive")
        update.check_version(version)
        update.failed = True
        update.accept_all()
        self._receiver.receive(version)
        update.failed = False

    @_by_owner
    def commit_update(self, version: int) -> None:
        """See `WeightTarget.commit_update`."""
        update = self._update_under_way("commit")
        update.check_version(version)
        update.failed = True
        update.check_complete()
        self._batches.forget()
        self._version = version
        self._update = None
        self._queue_step()

    # The methods below, too, run in the owner thread.

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDiedError(f"the transformers engine has died: {self._death}") from self._death

    @_by_owner
    def _add(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Future[list[Turn]]]:
        if self._version < 0 and self._update is None:
            raise UpdateError("the engine has dummy weights: commit a weight update before the first generation")
        require(self._away, "weights", "kv_cache")
        added = self._batches.add(requests, listener)
        self._queue_step()
        return added

    def _queue_step(self) -> None:
        if self._is_stepping() and not self._step_queued:
            self._step_queued = True
            self._owner.submit(self._step).add_done_callback(self._die_of)

    def _is_stepping(self) -> bool:
        return bool(self._batches) and not self._paused and self._update is None

    def _step(self) -> None:
        self._step_queued = False
        # A call that came first may have paused the engine.
        if self._is_stepping():
            self._batches.step(self._version)
            self._queue_step()

    def _die_of(self, step: Future[None]) -> None:
        self._death = step.exception()
        if self._death is not None:
            died = EngineDiedError(f"the transformers engine died: {self._death}")
            died.__cause__ = self._death
            self._batches.fail(died)

    def _update_under_way(self, action: str) -> WeightUpdate:
        if self._update is None:
            raise UpdateError(f"{action} without begin_update")
        if self._update.failed:
            raise UpdateError(f"{action} after update {self._update.version} failed: begin it anew")
        return self._update

    def _close(self) -> None:
        self._death = self._death or RuntimeError("it was closed")
        if self._started:
            self._batches.fail(EngineDiedError("the transformers engine was closed"))
            self._receiver.close()
            del self._batches, self._weights, self._memory, self._receiver
            self._segments = []
            self._started = False
