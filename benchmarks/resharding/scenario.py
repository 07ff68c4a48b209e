"""The weights to move: a model, its layouts on the trainer's ranks and the engine's workers, and the bucket size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from converters.architectures import Architecture, read_architecture
from converters.layout import Layout
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.megatron import megatron_layout
from converters.layouts.parallel_sizes import ParallelSizes
from converters.layouts.traced_layout import LoadTrace, traced_layout
from converters.number_formats import FP8_BLOCK
from converters.plan import Plan
from converters.topology import Topology
from megarl.resharding.direct.messages_by_peer import DTypes, MessagesByPeer, incoming, outgoing
from megarl.resharding.direct.quantised_shard import CutBlocksError, Quantisation
from megarl.resharding.direct.transfer_spec import TransferSpec
from resharding.fp8_engine import fp8_traces
from resharding.models import ENGINE, ENGINES, TRAINER, TRAINERS

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Scenario:
    """A small object sent to all processes, from which each derives the same plan."""

    config: Mapping[str, Any]
    """The model's config.json."""
    traces: Sequence[LoadTrace] | None
    """Traces of the engine's workers; None for an engine that is sharded like Megatron at its sizes."""
    bucket_bytes: int
    trainer_name: str = TRAINER
    engine_name: str = ENGINE
    device: str = "cpu"
    """Device of all ranks' tensors: the host, or one GPU."""

    @property
    def trainer_sizes(self) -> ParallelSizes:
        """The trainer's parallel sizes."""
        return TRAINERS[self.trainer_name]

    @property
    def engine_sizes(self) -> ParallelSizes:
        """The engine's parallel sizes."""
        return ENGINES[self.engine_name]

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture, as Megatron builds it."""
        return read_architecture(self.config)

    @cached_property
    def trainer(self) -> Layout:
        """Layout of the source ranks, with Transformer Engine's names, which megatron.core.resharding requires."""
        return megatron_layout(self.architecture, self.trainer_sizes, module_names="te")

    @cached_property
    def engine(self) -> Layout:
        """Layout of the destination ranks."""
        if self.traces is None:
            return self.megatron_engine
        return traced_layout([trace.shard for trace in self.traces], self.architecture.hf_shapes)

    @cached_property
    def megatron_engine(self) -> Layout:
        """Layout of destination ranks that run Megatron, at the engine's sizes."""
        return megatron_layout(self.architecture, self.engine_sizes, module_names="te")

    @cached_property
    def fp8(self) -> TransferSpec | None:
        """The transfer to a block-FP8 engine that is sharded like Megatron; None if that would split blocks."""
        spec = TransferSpec(
            self.architecture,
            self.trainer_sizes,
            "te",
            fp8_traces(self.architecture, self.megatron_engine),
            replicas=1,
            topology=Topology.apart(self.trainer.ranks, self.megatron_engine.ranks),
            bucket_bytes=self.bucket_bytes,
            quantisation=Quantisation(FP8_BLOCK, DTYPE),
        )
        try:
            _ = spec.quantised
        except CutBlocksError:
            return None
        return spec

    @cached_property
    def huggingface(self) -> Layout:
        """Layout of one rank that holds the whole model."""
        return huggingface_layout(self.architecture.hf_shapes)

    @property
    def ranks(self) -> int:
        """Number of processes: the trainer's, then the engine's."""
        return self.trainer.ranks + self.engine.ranks

    def dtypes(self, layout: Layout, rank: int) -> dict[str, torch.dtype]:
        """Name -> dtype of a rank's tensors, that of the HuggingFace tensors in them."""
        hf = self.architecture.hf_dtypes(DTYPE)
        if layout is self.fp8_engine:
            hf = FP8_BLOCK.checkpoint(self.architecture)[1]
        return {placement.local_name: hf[placement.hf_name] for placement in layout.placements(rank)}

    @cached_property
    def fp8_engine(self) -> Layout | None:
        """Layout of a block-FP8 engine's ranks, of codes and scales."""
        if self.fp8 is None:
            return None
        shapes = FP8_BLOCK.checkpoint(self.architecture)[0]
        return traced_layout([trace.shard for trace in self.fp8.traces], shapes)

    def outgoing(self, destination: Layout, rank: int) -> MessagesByPeer:
        """Messages that a source rank sends to fill `destination`, by destination rank."""
        if self.fp8 is not None and destination is self.fp8_engine:
            return self.fp8.outgoing(rank)
        return outgoing(Plan(self.trainer, destination), rank, self._dtypes(destination), self.bucket_bytes)

    def incoming(self, destination: Layout, rank: int) -> MessagesByPeer:
        """Messages that a rank of `destination` receives, by source rank."""
        if self.fp8 is not None and destination is self.fp8_engine:
            return self.fp8.incoming(rank).direct
        return incoming(Plan(self.trainer, destination), rank, self._dtypes(destination), self.bucket_bytes).direct

    def _dtypes(self, destination: Layout) -> list[DTypes]:
        return [self.dtypes(destination, worker) for worker in range(destination.ranks)]

    def needed_bytes(self, destination: Layout) -> int:
        """Bytes of all elements on the ranks of `destination`."""
        return sum(
            placement.local_box.size * self.dtypes(destination, rank)[placement.local_name].itemsize
            for rank in range(destination.ranks)
            for placement in destination.placements(rank)
        )

    def model_bytes(self) -> int:
        """Bytes of the model itself."""
        dtypes = self.architecture.hf_dtypes(DTYPE)
        return sum(
            torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in self.architecture.hf_shapes.items()
        )
