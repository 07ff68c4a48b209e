"""The trainer's ranks as senders of weights: through shared-memory segments, or directly to the engines' workers."""

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import ray
import torch

from converters.number_formats import NumberFormat
from megarl.cluster.trainer.rank_methods import TrainerWorker
from megarl.cluster.workers.worker import Call
from megarl.cluster.workers.worker_group import WorkerGroup
from megarl.resharding.direct.connections import Address
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.loader.buckets import Bucket
from megarl.resharding.transfer_stats import TransferStats


class WeightSender:
    """Sends a model's weights from all `ranks` that train it."""

    def __init__(self, ranks: WorkerGroup) -> None:
        self._ranks = ranks

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of every HF tensor of the model."""
        return dict(chain.from_iterable(part.items() for part in self._ranks.call(TrainerWorker.weight_dtypes)))

    def cut_blocks(self, number_format: NumberFormat, names: Collection[str]) -> set[str]:
        """The HF tensors among `names` with a block that is split over ranks, so that no rank can quantise it."""
        return set().union(*self._ranks.call(TrainerWorker.cut_blocks, number_format, frozenset(names)))

    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """Make every rank map the shared-memory segments of a refit."""
        self._ranks.call(TrainerWorker.map_segments, list(segments), segment_bytes)

    def write(self, bucket: Bucket) -> None:
        """Make every rank write its part of a bucket."""
        self._ranks.call(TrainerWorker.write, bucket)

    def rdma_ports(self) -> list[bool]:
        """For each rank, whether its machine has an InfiniBand, RoCE or EFA port that is up."""
        return self._ranks.call(TrainerWorker.has_rdma_port)

    def gpudirect_obstacles(self) -> list[str]:
        """For each rank, why GPUDirect does not work on its machine; empty if no obstacle is known."""
        return self._ranks.call(TrainerWorker.gpudirect_obstacle)

    def open_transfer(self, spec: TransferSpec) -> list[Address]:
        """Prepare all ranks to send their parts of `spec`; return their addresses for receivers."""
        stored: Any = ray.put(spec)
        return self._ranks.call(TrainerWorker.open_transfer, stored)

    def open_store(self, timeout_s: float) -> Address:
        """Create a store for process groups of ranks and receivers; return its address. It lasts until the next one."""
        return self._ranks.call_first(TrainerWorker.open_store, timeout_s)

    def begin_connect(self, rendezvous: Rendezvous) -> list[Call[None]]:
        """Begin to connect all ranks, after `open_transfer`, with their receivers."""
        return self._ranks.begin(TrainerWorker.connect_transfer, rendezvous)

    def begin_send(self, version: int) -> list[Call[TransferStats]]:
        """Begin to send the present weights as `version`; the result is how much each rank sent."""
        return self._ranks.begin(TrainerWorker.send, version)

    def close_transfer(self) -> None:
        """Free the memory of a transfer."""
        self._ranks.call(TrainerWorker.close_transfer)
