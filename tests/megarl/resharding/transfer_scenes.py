"""Scenes of transfers: models, the values of a version, and how the trainer and the engines cut them."""

import gc
import os
import zlib
from dataclasses import dataclass

import torch
from played_cuda import play_cuda

from converters.architectures import read_architecture
from converters.copying import copy_transfers
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.megatron import megatron_layout
from converters.layouts.parallel_sizes import ParallelSizes
from converters.plan import Cutting, Plan, plan
from converters.topology import Topology
from megatron_ext import device

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Scene:
    """A model, how the trainer cuts it, how many engine replicas of how many workers, and how they are joined."""

    config: dict
    source: ParallelSizes
    workers: int = 2
    replicas: int = 1
    bucket_bytes: int = 700
    transport: str = "shared_memory"
    ucx_tls: str = ""
    """The ways that UCX may take, of which it otherwise takes the best."""
    played_cuda: bool = False
    """Whether buckets are in memory that plays a GPU's."""
    source_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.bfloat16
    timeout_s: float = 20.0
    topology: Topology | None = None
    """With one, what a node needs enters it once, also if it is small."""

    def enter(self):
        """Set what this scene has in the environment of a rank's process."""
        # An error that holds itself would keep memory mapped until a collection, which may come early or late.
        gc.disable()
        if self.ucx_tls:
            os.environ["UCX_TLS"] = self.ucx_tls
        if self.played_cuda:
            play_cuda()
            # Relays, too, are to be mapped by it.
            device.backend = lambda: "nccl"

    @property
    def architecture(self):
        return read_architecture(self.config)

    @property
    def plan(self):
        return Plan(
            megatron_layout(self.architecture, self.source, module_names="local"),
            megatron_layout(
                self.architecture,
                ParallelSizes(world_size=self.workers, tensor_model_parallel_size=self.workers),
                module_names="local",
            ),
            self.replicas,
            self.topology,
            node_once=self.topology is not None,
            cutting=Cutting(grain=2, smallest=8) if self.topology else Cutting(),
        )

    @property
    def dtypes(self):
        shapes = map(self.plan.destination.local_shapes, range(self.workers))
        return [dict.fromkeys(each, self.dtype) for each in shapes]


STEP = 1000
"""A version of so many more has few elements that are others."""


def values_of(name, shape, version):
    """Random values that depend on version and HF name alone."""
    steps, first = divmod(version, STEP)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + first))
    values.view(-1)[steps % 97 :: 97] += steps
    return values


def shard_of(layout, rank, version):
    """The tensors of a rank of any layout, of a version."""
    hf = {name: values_of(name, shape, version) for name, shape in layout.hf_shapes.items()}
    tensors = {name: torch.zeros(shape) for name, shape in layout.local_shapes(rank).items()}
    for transfer in plan(huggingface_layout(layout.hf_shapes), layout):
        if transfer.destination_rank == rank:
            copy_transfers([transfer], hf, tensors)
    return tensors
