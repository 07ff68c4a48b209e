"""The engines as one object: requests are cut over them, everything else goes to all."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

import ray
import torch

from converters.errors import UserError
from converters.layout import Shape
from converters.layouts.traced_layout import LoadTrace
from megarl.cluster.placement import engine_place
from megarl.cluster.worker_group import Call, WorkerFailed, WorkerGroup
from megarl.data import Turn
from megarl.resharding.direct.connections import Address
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.resharding.loader.buckets import Bucket
from megarl.rollout import engine_kind
from megarl.rollout.protocol import Request
from megarl.schema import ClusterConfig, RolloutConfig

# Enough for a generation, an update and a question about health at the same time.
_CALLS_AT_ONCE = 4


class EngineGroup(WorkerGroup):
    """Equal engines, each in a process of its own."""

    def __init__(self, config: RolloutConfig, cluster: ClusterConfig, logs: Path) -> None:
        place = engine_place(cluster, config)
        super().__init__("engine", config.replicas, place, logs, calls_at_once=_CALLS_AT_ONCE)
        self._config = config
        self._kind = engine_kind(config.engine)

    def begin_start(self, model_path: Path, *, load_weights: bool) -> list[Call]:
        """Begin to start all engines; they are up when `wait_started` returns.

        Without `load_weights` their first weights come by a refit.
        """
        given = self._config.engine_args
        arguments = (model_path, given if load_weights else {**given, **self._kind.without_weights})
        self.make(*self._kind.engine_class, [arguments] * len(self))
        return self.begin("start")

    def wait_started(self, calls: Sequence[Call]) -> None:
        """Wait for what `begin_start` began. Raises UserError with the end of the log if an engine does not start."""
        try:
            self.wait(calls)
        except WorkerFailed as error:
            raise UserError(
                f"an engine did not start, check rollout.engine_args and model.path: {error.reason}", error.details
            ) from error

    def generate(self, requests: Sequence[Request]) -> list[list[Turn]]:
        """Samples of every request, in order."""
        answers = dict(self.generate_each(requests))
        return [answers[index] for index in range(len(requests))]

    def generate_each(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Turn]]]:
        """Each request's place and samples, as they are finished; neighbours go to the same engine."""
        bounds = [len(requests) * index // len(self) for index in range(len(self) + 1)]
        shares = [(requests[start:stop],) for start, stop in pairwise(bounds)]
        for engine, (index, turns) in self.stream_each("generate_each", shares):
            yield bounds[engine] + index, turns

    def generate_stream(self, request: Request) -> Iterator[list[int]]:
        """The token ids of a request's one sample, as they are sampled; of a group of one engine."""
        for _, token_ids in self.stream_each("generate_stream", [(request,)]):
            yield token_ids

    def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Stop sampling; requests in flight are kept or come back as they are."""
        self.call("pause", mode)

    def resume(self) -> None:
        """Sample on after `pause`."""
        self.call("resume")

    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """Let every engine map the shared-memory segments of a refit."""
        self.call("map_segments", list(segments), segment_bytes)

    def begin_update(self, version: int, names: Sequence[str], timeout_s: float) -> None:
        """Fence all engines until `commit_update`."""
        self.wait(self.begin("begin_update", version, list(names)), timeout_s)

    def begin_write(self, bucket: Bucket) -> list[Call]:
        """Begin to load a bucket in all engines; its segment is free again when `wait` returns."""
        return self.begin("write", bucket)

    def trace_layouts(
        self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]
    ) -> list[list[LoadTrace]]:
        """Record the layout of each engine's workers: where they keep the tensors of a HuggingFace checkpoint.

        Raises UserError for engines whose layout cannot be traced.
        """
        return self.call("trace_layout", dict(hf_shapes), dict(hf_dtypes))

    def open_transfer(self, spec: TransferSpec) -> list[Address]:
        """Prepare all workers of all engines to be written along `spec`; see `Engine.open_transfer`."""
        stored = ray.put(spec)
        opening = self.begin_each("open_transfer", [(stored, replica) for replica in range(len(self))])
        return list(chain.from_iterable(self.wait(opening)))

    def commit_update(self, version: int, timeout_s: float) -> None:
        """Lift the fence: from here on all engines serve `version`."""
        self.wait(self.begin("commit_update", version), timeout_s)

    def reset_prefix_cache(self) -> None:
        """Forget what was computed for earlier prompts."""
        self.call("reset_prefix_cache")
