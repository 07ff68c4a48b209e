"""A refit: the trained weights of all ranks into all engines, as one new version or not at all."""

from collections.abc import Mapping

from converters.errors import UserError
from megarl.cluster.engine_group import EngineGroup
from megarl.cluster.trainer_group import TrainerGroup
from megarl.cluster.worker_group import Call
from megarl.resharding.buckets import cut_into_buckets
from megarl.resharding.shared_memory import Segment

# While the engines load one bucket, the ranks write the next into the other segment.
_SEGMENTS = 2


class Refit:
    """Moves weights through two shared-memory segments that trainer and engines of one host have mapped."""

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: EngineGroup,
        hf_shapes: Mapping[str, tuple[int, ...]],
        bucket_bytes: int,
    ) -> None:
        if len(nodes := trainer.nodes() | engines.nodes()) > 1:
            raise UserError(
                f"the trainer and the engines run on {len(nodes)} machines, but a refit goes through the shared memory "
                "of one: give them fewer ranks or replicas, or a machine with more cores"
            )
        self._trainer = trainer
        self._engines = engines
        self._names = list(hf_shapes)
        self._buckets = cut_into_buckets(hf_shapes, trainer.weight_dtypes(), bucket_bytes, segments=_SEGMENTS)
        segment_bytes = max(bucket.size_bytes for bucket in self._buckets)
        segments = [Segment(segment_bytes) for _ in range(_SEGMENTS)]
        handles = [segment.handle() for segment in segments]
        try:
            trainer.connect(handles, segment_bytes)
            engines.connect(handles, segment_bytes)
        finally:
            # Mapped memory lives on, and ends with the last process that mapped it.
            for segment in segments:
                segment.close()

    def __call__(self, version: int) -> None:
        """Give the engines the trainer's present weights as `version`; they serve nothing in between."""
        self._engines.begin_update(version, self._names)
        loading: dict[int, list[Call]] = {}
        for bucket in self._buckets:
            self._engines.wait(loading.pop(bucket.segment, []))
            self._trainer.write(bucket)
            loading[bucket.segment] = self._engines.begin_write(bucket)
        for references in loading.values():
            self._engines.wait(references)
        self._engines.commit_update(version)
