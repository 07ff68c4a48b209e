"""An engine whose model is in worker processes of its library, which it calls by method name."""

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple

import torch

from converters.layout import Shape
from converters.layouts.traced_layout import PackedTrace
from megarl.process.profiler import by_worker
from megarl.resharding.direct.weight_receiver import WeightReceiver, results
from megarl.rollout.owned_engine import OwnedEngine, by_owner
from megarl.rollout.worker_memory import require
from megatron_ext.memory.device_memory import CountedMemory

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class EngineOfWorkers(OwnedEngine):
    """The calls that such engines have in common; each of their workers has methods of these names."""

    _recorded = 1
    """Number of workers that are asked to record."""

    @by_owner
    def trace_layout(self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> list[PackedTrace]:
        """See `LayoutSource.trace_layout`, and `tracing.trace_model` of each engine."""
        require(self._away, "weights")
        return self._workers("trace_layout", dict(hf_shapes), dict(hf_dtypes))

    @by_owner
    def count_memory(self, memory: CountedMemory) -> None:
        """See `Sleeper.count_memory`."""
        self._workers("count_memory", memory)

    @by_owner
    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """See `WeightTarget.map_segments`."""
        self._workers("map_segments", list(segments), segment_bytes)

    @by_owner
    def call_receivers(self, method: Callable[[WeightReceiver, *Ts], R], *arguments: *Ts) -> list[R]:
        """See `WeightTarget.call_receivers`."""
        return self._receivers(method, *arguments)

    @by_owner
    def start_profiler(self) -> None:
        """See `Profiled.start_profiler`."""
        self._recorded = len(self._workers("start_profiler", os.getpid()))

    @by_owner
    def stop_profiler(self, most_events: int, since_us: float) -> Mapping[str, bytes]:
        """See `Profiled.stop_profiler`."""
        return by_worker(self._workers("stop_profiler", most_events // self._recorded, since_us))

    # The methods below, too, run in the owner thread.

    @abstractmethod
    def _workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker."""

    def _receive(self, version: int) -> None:
        self._receivers(WeightReceiver.receive, version)

    def _receivers(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        require(self._away, "weights")
        return results(self._workers("call_receiver", method, *arguments))
