"""HuggingFace transformers as an engine, with the model in this process."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, get_args

import torch
from torch import Tensor

from converters.layout import Shape
from converters.layouts.traced_layout import PackedTrace
from megarl.data import Turn
from megarl.resharding.direct.weight_receiver import WeightReceiver
from megarl.resharding.loader.buckets import Bucket, views
from megarl.resharding.shared_memory import map_segment
from megarl.rollout.owned_engine import by_owner
from megarl.rollout.protocol import EngineDiedError, EngineMemory, Load, Request
from megarl.rollout.request_in_flight import Answer, Listener, SampleInFlight
from megarl.rollout.stepping_engine import SteppingEngine
from megarl.rollout.transformers.arguments import read_arguments
from megarl.rollout.worker_memory import WorkerMemory, require
from megatron_ext import device
from megatron_ext.memory.device_memory import CountedMemory

if TYPE_CHECKING:
    from megarl.rollout.transformers.batches import Batches
    from megarl.rollout.transformers.weights import ModelWeights

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class TransformersEngine(SteppingEngine):
    """See `megarl.rollout.protocol.Engine`. `engine_args` are fields of `TransformersArguments`."""

    title = "transformers"

    def __init__(self, model_path: Path | str, engine_args: Mapping[str, Any]) -> None:
        super().__init__(model_path, engine_args)
        self._batches: Batches
        self._weights: ModelWeights
        self._memory: WorkerMemory
        self._receiver: WeightReceiver
        self._segments: list[Tensor] = []
        self._started = False

    @by_owner
    def start(self) -> None:
        """See `Sampler.start`."""
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

    @by_owner
    def trace_layout(self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> list[PackedTrace]:
        """See `LayoutSource.trace_layout`."""
        require(self._away, "weights")
        return [PackedTrace.of(self._weights.trace(hf_shapes, hf_dtypes))]

    @by_owner
    def worker_parts(self) -> list[int]:
        """See `LayoutSource.worker_parts`."""
        return [0]

    @by_owner
    def sleep(self) -> None:
        """See `Sleeper.sleep`. The KV cache belongs to requests, and ends with them."""
        self._batches.abort()
        self._memory.sleep()
        self._away = frozenset(get_args(EngineMemory))

    @by_owner
    def wake_up(self, parts: Sequence[EngineMemory]) -> None:
        """See `Sleeper.wake_up`."""
        self._memory.wake_up(parts)
        self._away -= frozenset(parts)

    @by_owner
    def count_memory(self, memory: CountedMemory) -> None:
        """See `Sleeper.count_memory`."""
        self._memory.count_in(memory)

    @by_owner
    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """See `WeightTarget.map_segments`."""
        self._segments = [map_segment(segment, segment_bytes) for segment in segments]

    @by_owner
    def call_receivers(self, method: Callable[[WeightReceiver, *Ts], R], *arguments: *Ts) -> list[R]:
        """See `WeightTarget.call_receivers`."""
        require(self._away, "weights")
        return [method(self._receiver, *arguments)]

    # The methods below, too, run in the owner thread.

    def _add_samples(self, requests: Sequence[Request], listener: Listener | None) -> list[Answer]:
        return self._batches.add(requests, listener)

    def _can_step(self) -> bool:
        return bool(self._batches) and not self._paused and self._update is None

    def _compute(self) -> None:
        self._batches.step(self._version)

    def _load_after_step(self) -> Load | None:
        # Never preempted: a batch that has begun is finished first.
        return Load(*self._batches.counts(), kv_used=None, preempted=0)

    def _samples(self) -> Iterable[SampleInFlight]:
        return self._batches.samples()

    def _abort(self) -> None:
        self._batches.abort()

    def _abort_some(self, answers: Collection[Future[list[Turn]]]) -> None:
        self._batches.abort(answers)

    def _fail(self, error: EngineDiedError) -> None:
        self._batches.fail(error)

    def _reset_kv_cache(self) -> None:
        self._batches.forget()

    def _keep_kv_cache(self, version: int) -> None:
        # A KV cache belongs to one request, and does not exist before its first token.
        pass

    def _load_weights(self, bucket: Bucket) -> None:
        self._weights.load(views(bucket, self._segments[bucket.segment]).items())
        device.synchronize()

    def _receive(self, version: int) -> None:
        self._receiver.receive(version)

    def _close(self) -> None:
        if self._started:
            self._batches.fail(self._closed())
            self._receiver.close()
            del self._batches, self._weights, self._memory, self._receiver
            self._segments = []
            self._started = False
