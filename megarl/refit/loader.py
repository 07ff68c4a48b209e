"""The loader path: whole HuggingFace tensors are assembled in shared memory and read by the engine's own loader."""

from dataclasses import replace

from converters.architectures import Architecture
from converters.errors import UserError
from megarl.cluster.engines.engines import Engines, wait_in_refit
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.cluster.workers.worker import Call, WorkerFailed
from megarl.refit.direct import DirectPath, NoDirectPathError
from megarl.refit.path import Receivers, WeightPath
from megarl.resharding.loader.buckets import Quantised, cut_into_buckets
from megarl.resharding.shared_memory import Segment
from megarl.resharding.transfer_stats import TransferStats
from megarl.rollout.protocol import Engine
from megarl.schema import RefitConfig

# While the engines load one bucket, the ranks write the next into the other segment.
_SEGMENTS = 2


class LoaderPath:
    """Moves weights through two shared-memory segments that trainer and engines of one host map.

    It hands over to its `candidate`, if it has one, once the engines have weights to compare with.
    """

    is_direct = False

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: Engines,
        architecture: Architecture,
        config: RefitConfig,
        *,
        candidate: DirectPath | None = None,
        refusal: str = "",
    ) -> None:
        """`refusal` says why there is no direct path. Raises UserError if the configuration allows no other path."""
        self._trainer = trainer
        self._receivers = Receivers.of(engines)
        self._config = config
        self._buckets = cut_into_buckets(
            architecture.hf_shapes,
            trainer.weights.dtypes(),
            config.bucket_bytes,
            segments=_SEGMENTS,
            quantised=_quantised(trainer, engines, architecture),
        )
        self._candidate = candidate
        self._refusal = ""
        if refusal:
            self._refuse_direct(refusal)

    @property
    def description(self) -> str:
        """The path, and the reason for it."""
        if self._config.path == "loader":
            return "loader (refit.path=loader)"
        return f"loader ({self._refusal or 'this is the first refit'})"

    def set_engines(self, engines: Engines) -> None:
        """See `WeightPath.set_engines`."""
        if self._receivers.matches(engines):
            return
        if self._candidate is not None:
            self._candidate.set_engines(engines)
        self._receivers = Receivers.of(engines)

    def _refuse_direct(self, reason: str) -> None:
        """Stay on the loader path for this `reason`. Raises UserError if the configuration forbids it."""
        if self._config.path == "direct":
            raise UserError(f"refit.path=direct is not possible: {reason}; set refit.path to auto or loader")
        self._refusal, self._candidate = reason, None

    def send(self, version: int) -> TransferStats:  # noqa: ARG002
        """See `WeightPath.send`."""
        if not self._receivers.are_connected:
            self._open()
        loading: dict[int, list[Call[None]]] = {}
        for bucket in self._buckets:
            wait_in_refit(loading.pop(bucket.segment, []), self._config.timeout_s)
            self._trainer.weights.write(bucket)
            loading[bucket.segment] = self._receivers.engines.begin(Engine.write, bucket)
        for references in loading.values():
            wait_in_refit(references, self._config.timeout_s)
        return TransferStats(sum(bucket.size_bytes for bucket in self._buckets))

    def recover(self, failure: WorkerFailed) -> None:
        """See `WeightPath.recover`: raises, since a loader that failed would fail again."""
        if self._refusal and failure.error is not None:
            raise UserError(
                f"the engine does not take the policy's weights, {self._refusal}: give rollout.engine_args nothing "
                "that makes it another model than model.path"
            ) from failure
        raise failure

    def next_path(self, version: int) -> WeightPath:
        """See `WeightPath.next_path`."""
        if self._candidate is None:
            return self
        try:
            self._candidate.confirm(version)
        except NoDirectPathError as error:
            self._refuse_direct(str(error))
            return self
        self.close()
        return self._candidate

    def close(self) -> None:
        """Free the segments until the next `send`."""
        if self._receivers.are_connected:
            self._map_segments([], 0)
            self._receivers = replace(self._receivers, are_connected=False)

    def _open(self) -> None:
        size = max(bucket.size_bytes for bucket in self._buckets)
        segments = [Segment(size) for _ in range(_SEGMENTS)]
        try:
            self._map_segments([segment.handle() for segment in segments], size)
        finally:
            # Mapped memory stays until the last process unmaps it.
            for segment in segments:
                segment.close()
        self._receivers = replace(self._receivers, are_connected=True)

    def _map_segments(self, segments: list[str], segment_bytes: int) -> None:
        self._trainer.weights.map_segments(segments, segment_bytes)
        self._receivers.engines.map_segments(segments, segment_bytes, self._config.timeout_s)


def _quantised(trainer: TrainerGroup, engines: Engines, architecture: Architecture) -> Quantised | None:
    if engines.number_format is None:
        return None
    number_format = engines.number_format
    names = number_format.quantised_names(architecture)
    shared = number_format.elements_per_code > 1
    return Quantised(number_format, names, names if shared else trainer.weights.cut_blocks(number_format, names))
