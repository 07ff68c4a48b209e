"""vLLM as an engine: its core, owned and stepped by one thread, behind the three protocols of an engine."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar, TypeVarTuple, get_args

import torch

from converters.errors import UserError
from converters.layout import Shape
from converters.layouts.traced_layout import LoadTrace
from megarl.data import Turn
from megarl.process.loading import load
from megarl.resharding.direct.weight_receiver import WeightReceiver, results
from megarl.resharding.loader.buckets import Bucket
from megarl.rollout.protocol import EngineDiedError, EngineMemory, PauseMode, Request, UpdateError
from megarl.rollout.request_in_flight import Listener
from megarl.rollout.text import Texts
from megarl.rollout.update import WeightUpdate
from megarl.rollout.vllm.arguments import make_engine_config, prepare_environment
from megarl.rollout.vllm.core import Core, InProcessCore
from megarl.rollout.vllm.data_parallel import DataParallelCore
from megarl.rollout.vllm.sequences import SequencesInFlight
from megarl.rollout.worker_memory import require
from megatron_ext.device_memory import CountedMemory

R = TypeVar("R")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")


def _by_owner(method: "Callable[Concatenate[VllmEngine, P], R]") -> "Callable[Concatenate[VllmEngine, P], R]":
    """Let a method run in the thread that owns the core, behind what was asked before; a dead engine runs none."""

    @functools.wraps(method)
    def call(self: "VllmEngine", *arguments: P.args, **options: P.kwargs) -> R:
        def task() -> R:
            self._check_alive()
            try:
                return method(self, *arguments, **options)
            except EngineDiedError as error:
                self._die(error)
                raise

        return self._owner.submit(task).result()

    return call


class VllmEngine:
    """See `megarl.rollout.protocol.Engine`. `engine_args` are fields of vLLM's EngineArgs by their own names.

    One thread owns the core: every call from outside and every step of the engine is a task in its queue, so they never
    overlap and no lock is needed. A step puts the next one at the end of the queue, behind the calls that wait.
    """

    def __init__(self, model_path: Path | str, engine_args: Mapping[str, Any]) -> None:
        self._model_path = Path(model_path)
        self._texts = Texts(self._model_path)
        self._engine_args = dict(engine_args)
        self._owner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self._core: Core | None = None
        self._sequences: SequencesInFlight
        self._version = -1
        self._update: WeightUpdate | None = None
        self._away: frozenset[EngineMemory] = frozenset()
        self._paused = False
        self._held = False
        self._step_queued = False
        self._death: BaseException | None = None

    @_by_owner
    def start(self) -> None:
        """See `Generator.start`."""
        prepare_environment(self._engine_args)
        # Before all else of vLLM, which comes with it.
        load("vllm.v1.engine.llm_engine", "LLMEngine")
        config = make_engine_config(self._model_path, self._engine_args)
        parallel = config.parallel_config.data_parallel_size > 1
        self._core = DataParallelCore(config) if parallel else InProcessCore(config)
        self._sequences = SequencesInFlight(self._core, config.model_config.max_model_len)
        self._version = -1 if config.load_config.load_format == "dummy" else 0

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
        self._hold()
        self._paused = True
        if mode == "abort":
            self._sequences.abort()

    @_by_owner
    def resume(self) -> None:
        """See `Generator.resume`."""
        self._paused = False
        self._release()

    @_by_owner
    def version(self) -> int:
        """See `Generator.version`."""
        return self._version

    @_by_owner
    def reset_prefix_cache(self) -> None:
        """See `Generator.reset_prefix_cache`."""
        self._forget()

    def close(self) -> None:
        """See `Generator.close`."""
        self._owner.submit(self._close).result()

    @_by_owner
    def trace_layout(self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> list[LoadTrace]:
        """See `LayoutSource.trace_layout` and `tracing.trace_model`."""
        from megarl.rollout.vllm.tracing import check_version

        require(self._away, "weights")
        # Here too: what a worker of another process raises arrives as another exception.
        check_version()
        return self._workers("trace_layout", hf_shapes, hf_dtypes)

    @_by_owner
    def worker_parts(self) -> list[int]:
        """See `LayoutSource.worker_parts`."""
        return self._workers("part")

    @_by_owner
    def sleep(self) -> None:
        """See `Sleeper.sleep`."""
        self._sequences.abort()
        self._running().sleep()
        self._away = frozenset(get_args(EngineMemory))

    @_by_owner
    def wake_up(self, parts: Sequence[EngineMemory]) -> None:
        """See `Sleeper.wake_up`."""
        if wanted := sorted(self._away.intersection(parts)):
            self._running().wake_up(wanted)
            self._away -= frozenset(wanted)

    @_by_owner
    def count_memory(self, memory: CountedMemory) -> None:
        """See `Sleeper.count_memory`."""
        self._workers("count_memory", memory)

    @_by_owner
    def begin_update(self, version: int, names: Sequence[str]) -> None:
        """See `WeightTarget.begin_update`."""
        if self._update is not None and not self._update.failed and self._update.version != version:
            raise UpdateError(f"update {version} cannot begin before {self._update.version} was committed")
        if version <= self._version:
            raise UpdateError(f"update {version} is not newer than the weights of version {self._version}")
        if self._update is not None:
            self._workers("abort_weight_update")
        self._hold()
        self._update = WeightUpdate(version, names)

    @_by_owner
    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """See `WeightTarget.map_segments`."""
        self._workers("init_weight_transfer_engine", {"paths": list(segments), "segment_bytes": segment_bytes})

    @_by_owner
    def write(self, bucket: Bucket) -> None:
        """See `WeightTarget.write`."""
        require(self._away, "weights")
        update = self._update_under_way("write")
        update.failed = True
        if not update.loads_by_name:
            self._workers("start_weight_update")
            update.loads_by_name = True
        update.accept(entry.name for entry in bucket.entries)
        self._workers("update_weights", {"bucket": bucket})
        update.failed = False

    @_by_owner
    def call_receivers(self, method: Callable[[WeightReceiver, *Ts], R], *arguments: *Ts) -> list[R]:
        """See `WeightTarget.call_receivers`."""
        return self._receivers(method, *arguments)

    @_by_owner
    def receive(self, version: int) -> None:
        """See `WeightTarget.receive`."""
        update = self._update_under_way("receive")
        update.check_version(version)
        update.failed = True
        update.accept_all()
        self._receivers(WeightReceiver.receive, version)
        update.failed = False

    @_by_owner
    def commit_update(self, version: int) -> None:
        """See `WeightTarget.commit_update`."""
        update = self._update_under_way("commit")
        update.check_version(version)
        update.failed = True
        update.check_complete()
        if update.loads_by_name:
            self._workers("finish_weight_update")
        self._forget()
        self._version = version
        self._update = None
        self._release()

    # The methods below, too, run in the owner thread.

    def _running(self) -> Core:
        if self._core is None:
            raise RuntimeError("the vLLM engine was not started")
        return self._core

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDiedError(f"the vLLM engine has died: {self._death}") from self._death

    @_by_owner
    def _add(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Future[list[Turn]]]:
        if self._version < 0 and self._update is None:
            raise UpdateError("the engine has dummy weights: commit a weight update before the first generation")
        require(self._away, "weights", "kv_cache")
        added = self._sequences.add(requests, listener)
        self._queue_step()
        return added

    def _queue_step(self) -> None:
        if self._sequences and not self._held and not self._step_queued:
            self._step_queued = True
            self._owner.submit(self._step).add_done_callback(self._die_of)

    def _step(self) -> None:
        self._step_queued = False
        # A call that came first may have held the core.
        if self._sequences and not self._held:
            self._sequences.collect(self._running().step(), self._version)
            self._queue_step()

    def _hold(self) -> None:
        if not self._held:
            self._sequences.collect(self._running().hold(), self._version)
            self._held = True

    def _release(self) -> None:
        if self._held and not self._paused and self._update is None:
            self._running().release()
            self._held = False
            self._queue_step()

    def _die_of(self, step: Future[None]) -> None:
        error = step.exception()
        if error is not None:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        self._death = error
        died = EngineDiedError(f"the vLLM engine died: {error}")
        died.__cause__ = error
        self._sequences.fail(died)

    def _workers(self, method: str, *arguments: Any) -> list[Any]:
        return self._running().call_workers(method, *arguments)

    def _receivers(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        require(self._away, "weights")
        return results(self._workers("call_receiver", method, *arguments))

    def _update_under_way(self, action: str) -> WeightUpdate:
        if self._update is None:
            raise UpdateError(f"{action} without begin_update")
        if self._update.failed:
            raise UpdateError(f"{action} after update {self._update.version} failed: begin it anew")
        return self._update

    def _forget(self) -> None:
        # Sequences in flight are put back to be computed from their first token: their cache is of older weights.
        if not self._running().forget():
            raise RuntimeError("vLLM could not reset its prefix cache")

    def _close(self) -> None:
        self._death = self._death or RuntimeError("it was closed")
        if self._core is not None:
            self._sequences.fail(EngineDiedError("the vLLM engine was closed"))
            self._core.close()
            self._core = None
