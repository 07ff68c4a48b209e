"""vLLM as an engine: the LLMEngine of this process, owned and stepped by one thread."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from converters.errors import UserError
from converters.layouts.traced_layout import LoadTrace
from megarl.data import Turn
from megarl.resharding.direct.connections import Address, TransferError
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.loader.buckets import Bucket
from megarl.rollout.protocol import EngineDiedError, PauseMode, Request, UpdateError
from megarl.rollout.update import WeightUpdate
from megarl.rollout.vllm.arguments import make_engine_config, prepare_environment
from megarl.rollout.vllm.sequences import Listener, SequencesInFlight

Result = TypeVar("Result")


class VllmEngine:
    """See `megarl.rollout.protocol.Engine`. `engine_args` are fields of vLLM's EngineArgs by their own names.

    One thread owns vLLM: every call from outside and every step of the engine is a task in its queue, so they never
    overlap and no lock is needed. A step puts the next one at the end of the queue, behind the calls that wait.
    """

    def __init__(self, model_path: Path | str, engine_args: Mapping[str, Any]) -> None:
        self._model_path = Path(model_path)
        self._engine_args = dict(engine_args)
        self._owner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self._llm_engine: Any = None
        self._sequences: SequencesInFlight
        self._version = -1
        self._update: WeightUpdate | None = None
        self._paused = False
        self._step_queued = False
        self._death: BaseException | None = None

    def start(self) -> None:
        """See `Engine.start`."""
        prepare_environment()
        self._call(self._start)

    def generate(self, requests: Sequence[Request]) -> list[list[Turn]]:
        """See `Engine.generate`."""
        return [future.result() for future in self._call(self._add, requests)]

    def generate_each(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Turn]]]:
        """See `Engine.generate_each`."""
        place = {future: index for index, future in enumerate(self._call(self._add, requests))}
        for future in as_completed(place):
            yield place[future], future.result()

    def generate_stream(self, request: Request) -> Iterator[list[int]]:
        """See `Engine.generate_stream`."""
        if request.sampling.samples != 1:
            raise UserError(f"a stream of {request.sampling.samples} samples: ask for one")
        pieces = SimpleQueue[list[int] | None]()
        (future,) = self._call(self._add, [request], pieces.put)
        future.add_done_callback(lambda _: pieces.put(None))
        while (piece := pieces.get()) is not None:  # not `yield from`: Ray sends to what this gives
            yield piece
        future.result()

    def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        self._call(self._pause, mode)

    def resume(self) -> None:
        """See `Engine.resume`."""
        self._call(self._resume)

    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """See `Engine.map_segments`."""
        init_info = {"paths": list(segments), "segment_bytes": segment_bytes}
        self._call(self._workers, "init_weight_transfer_engine", init_info)

    def begin_update(self, version: int, names: Sequence[str]) -> None:
        """See `Engine.begin_update`."""
        self._call(self._begin_update, version, names)

    def open_transfer(self, spec: TransferSpec, replica: int) -> list[Address]:
        """See `Engine.open_transfer`."""
        return self._call(self._workers, "open_transfer", spec, replica)

    def connect_transfer(self, rendezvous: Rendezvous) -> None:
        """See `Engine.connect_transfer`."""
        self._call(self._transfer, "connect_transfer", rendezvous)

    def receive(self, version: int) -> None:
        """See `Engine.receive`."""
        self._call(self._receive, version)

    def compare(self, version: int) -> set[str]:
        """See `Engine.compare`."""
        return set().union(*self._call(self._transfer, "compare_transfer", version))

    def close_transfer(self) -> None:
        """See `Engine.close_transfer`."""
        self._call(self._workers, "close_transfer")

    def write(self, bucket: Bucket) -> None:
        """See `Engine.write`."""
        self._call(self._write, bucket)

    def commit_update(self, version: int) -> None:
        """See `Engine.commit_update`."""
        self._call(self._commit_update, version)

    def version(self) -> int:
        """See `Engine.version`."""
        return self._call(lambda: self._version)

    def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`."""
        self._call(self._reset_prefix_cache)

    def trace_layout(
        self, hf_shapes: Mapping[str, tuple[int, ...]], hf_dtypes: Mapping[str, torch.dtype]
    ) -> list[LoadTrace]:
        """Where each worker keeps the tensors of a HuggingFace checkpoint; see `tracing.trace_model`.

        Raises UserError for a version of vLLM that is not supported.
        """
        return self._call(self._trace_layout, hf_shapes, hf_dtypes)

    def close(self) -> None:
        """See `Engine.close`."""
        self._owner.submit(self._close).result()

    # The methods below run in the owner thread.

    def _call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        def task() -> Result:
            if self._death is not None:
                raise EngineDiedError(f"the vLLM engine has died: {self._death}") from self._death
            return function(*arguments)

        return self._owner.submit(task).result()

    def _start(self) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        config = make_engine_config(self._model_path, self._engine_args)
        self._llm_engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._sequences = SequencesInFlight(self._llm_engine)
        self._version = -1 if config.load_config.load_format == "dummy" else 0

    def _add(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Future[list[Turn]]]:
        if self._version < 0 and self._update is None:
            raise UpdateError("the engine has dummy weights: commit a weight update before the first generation")
        added = self._sequences.add(requests, listener)
        self._queue_step()
        return added

    def _queue_step(self) -> None:
        if self._sequences and not self._paused and self._update is None and not self._step_queued:
            self._step_queued = True
            self._owner.submit(self._step).add_done_callback(self._die_of)

    def _step(self) -> None:
        self._step_queued = False
        # A call that came first may have paused the engine.
        if self._sequences and not self._paused and self._update is None:
            outputs = self._llm_engine.engine_core.get_output()
            self._sequences.collect(outputs.outputs, self._version)
            self._queue_step()

    def _die_of(self, step: Future[None]) -> None:
        self._death = step.exception()
        if self._death is not None:
            died = EngineDiedError(f"the vLLM engine died: {self._death}")
            died.__cause__ = self._death
            self._sequences.fail(died)

    def _pause(self, mode: PauseMode) -> None:
        self._paused = True
        if mode == "abort":
            self._sequences.abort()

    def _resume(self) -> None:
        self._paused = False
        self._queue_step()

    def _trace_layout(self, *arguments: Any) -> list[LoadTrace]:
        from megarl.rollout.vllm.tracing import check_version

        # Here too: what a worker of another process raises arrives as another exception.
        check_version()
        return self._workers("trace_layout", *arguments)

    def _workers(self, method: str, *arguments: Any) -> list[Any]:
        return self._llm_engine.collective_rpc(method, args=arguments)

    def _transfer(self, method: str, *arguments: Any) -> list[Any]:
        results = self._workers(method, *arguments)
        for result in results:
            if isinstance(result, str):
                raise TransferError(result)
        return results

    def _receive(self, version: int) -> None:
        update = self._update_under_way("receive")
        update.check_version(version)
        update.failed = True
        update.accept_all()
        self._transfer("receive_transfer", version)
        update.failed = False

    def _begin_update(self, version: int, names: Sequence[str]) -> None:
        if self._update is not None and not self._update.failed:
            raise UpdateError(f"update {version} cannot begin before {self._update.version} was committed")
        if version <= self._version:
            raise UpdateError(f"update {version} is not newer than the weights of version {self._version}")
        if self._update is not None:
            self._workers("abort_weight_update")
        self._update = WeightUpdate(version, names)

    def _write(self, bucket: Bucket) -> None:
        update = self._update_under_way("write")
        update.failed = True
        if not update.loads_by_name:
            self._workers("start_weight_update")
            update.loads_by_name = True
        update.accept(entry.name for entry in bucket.entries)
        self._workers("update_weights", {"bucket": bucket})
        update.failed = False

    def _commit_update(self, version: int) -> None:
        update = self._update_under_way("commit")
        update.check_version(version)
        update.failed = True
        update.check_complete()
        if update.loads_by_name:
            self._workers("finish_weight_update")
        self._reset_prefix_cache()
        self._version = version
        self._update = None
        self._queue_step()

    def _update_under_way(self, action: str) -> WeightUpdate:
        if self._update is None:
            raise UpdateError(f"{action} without begin_update")
        if self._update.failed:
            raise UpdateError(f"{action} after update {self._update.version} failed: begin it anew")
        return self._update

    def _reset_prefix_cache(self) -> None:
        # Sequences in flight are put back to be computed from their first token: their cache is of older weights.
        if not self._llm_engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM could not reset its prefix cache")

    def _close(self) -> None:
        self._death = self._death or RuntimeError("it was closed")
        if self._llm_engine is not None:
            self._sequences.fail(EngineDiedError("the vLLM engine was closed"))
            self._llm_engine.engine_core.shutdown()
            self._llm_engine = None
