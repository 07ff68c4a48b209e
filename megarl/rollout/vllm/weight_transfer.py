"""Loads weights from shared memory, as a backend of vLLM's weight-transfer API (vllm.distributed.weight_transfer)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megarl.resharding.loader.buckets import Bucket, loadable
from megarl.resharding.shared_memory import map_segment
from megarl.rollout.vllm.held_experts import experts_held, without_others
from megarl.rollout.vllm.reload import Reload

BACKEND = "shm"


@dataclass
class Segments(WeightTransferInitInfo):
    """The shared-memory segments of later buckets."""

    paths: list[str]
    segment_bytes: int


@dataclass
class BucketWritten(WeightTransferUpdateInfo):
    """A bucket whose tensors have been written to its segment."""

    bucket: Bucket


class SharedMemoryTransfer(WeightTransferEngine[Segments, BucketWritten]):
    """Receives weights on one worker: maps the segments and loads buckets through the model's own weight loaders."""

    init_info_cls = Segments
    update_info_cls = BucketWritten
    _first_reload: Reload | None = None
    _reload: Reload | None = None

    def init_transfer_engine(self, init_info: Segments) -> None:
        """Map the segments."""
        self._memories: list[Tensor] = [map_segment(path, init_info.segment_bytes) for path in init_info.paths]

    def start_weight_update(self) -> None:
        """Let vLLM collect the tensors of each layer and process the layer once it has them all."""
        # After an update that failed halfway, layers still wait for tensors that will never come.
        if self._reload is not None:
            self._reload.finish()
        self._held = experts_held(self.model)
        self._reload = Reload(self.model, self.model_config)
        self._first_reload = self._first_reload or self._reload

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load one bucket. The inherited method also synchronizes an accelerator, which not every machine has."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: BucketWritten) -> None:
        """Load one bucket into the model, without copying or quantising the experts of other workers."""
        bucket = without_others(update_info.bucket, self._held)
        with torch.no_grad():
            # Copies, because vLLM keeps the tensors until their layer is complete and the segment is soon overwritten.
            self.model.load_weights(list(loadable(bucket, self._memories[bucket.segment])))

    def finish_weight_update(self) -> None:
        """Process the remaining layers: attention, and layers with padding."""
        assert self._reload is not None
        self._reload.finish()
        self._reload = None

    def shutdown(self) -> None:
        """Unmap the segments."""
        self._memories = []


def register() -> None:
    """Register the backend with vLLM in this process."""
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)
