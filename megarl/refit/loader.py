"""The loader path: whole HuggingFace tensors, put together in shared memory, read by the engine's own loader."""

from collections.abc import Mapping

from converters.layout import Shape
from megarl.cluster.engine_group import Engines
from megarl.cluster.trainer_group import TrainerGroup
from megarl.cluster.worker_group import Call, wait
from megarl.resharding.loader.buckets import cut_into_buckets
from megarl.resharding.shared_memory import Segment
from megarl.rollout.protocol import Engine

# While the engines load one bucket, the ranks write the next into the other segment.
_SEGMENTS = 2


class LoaderPath:
    """Moves weights through two shared-memory segments that trainer and engines of one host map."""

    def __init__(
        self, trainer: TrainerGroup, engines: Engines, hf_shapes: Mapping[str, Shape], bucket_bytes: int
    ) -> None:
        self._trainer = trainer
        self._engines = engines
        self._buckets = cut_into_buckets(hf_shapes, trainer.weight_dtypes(), bucket_bytes, segments=_SEGMENTS)
        self._is_open = False

    def send(self) -> int:
        """Give all weights to engines that have begun an update. The number of bytes."""
        if not self._is_open:
            self._open()
        loading: dict[int, list[Call[None]]] = {}
        for bucket in self._buckets:
            wait(loading.pop(bucket.segment, []))
            self._trainer.write(bucket)
            loading[bucket.segment] = self._engines.begin(Engine.write, bucket)
        for references in loading.values():
            wait(references)
        return sum(bucket.size_bytes for bucket in self._buckets)

    def close(self) -> None:
        """Free the segments, until the next time."""
        if self._is_open:
            self._map_segments([], 0)
            self._is_open = False

    def _open(self) -> None:
        size = max(bucket.size_bytes for bucket in self._buckets)
        segments = [Segment(size) for _ in range(_SEGMENTS)]
        try:
            self._map_segments([segment.handle() for segment in segments], size)
        finally:
            # Mapped memory lives on, and ends with the last process that mapped it.
            for segment in segments:
                segment.close()
        self._is_open = True

    def _map_segments(self, segments: list[str], segment_bytes: int) -> None:
        self._trainer.map_segments(segments, segment_bytes)
        self._engines.map_segments(segments, segment_bytes)
