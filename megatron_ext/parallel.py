"""Creates and destroys the process groups of a model's ranks."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes
from megatron_ext import device
from megatron_ext.loopback import is_loopback, listen_on_loopback

TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives."""
_TIMEOUT_OF_FILES = timedelta(hours=12)
_SEED = 1234
"""Megatron's default. It only affects dropout, since weights are always loaded."""


def initialize(parallel: ParallelSizes, rank: int, init_method: str, *, timeout: timedelta = TIMEOUT) -> None:
    """Join the job as `rank` of `parallel.world_size`, and create Megatron's groups and random number generators.

    `init_method` is torch's, such as tcp://127.0.0.1:29500; with a loopback address, nothing listens on other
    interfaces. `timeout` is that of the collectives of all groups.

    Raises UserError for a rank outside the world, or if the process belongs to a job of another size.
    """
    if not 0 <= rank < parallel.world_size:
        raise UserError(
            f"rank {rank} does not exist in a job of world_size {parallel.world_size}; start one process per rank,"
            " numbered from 0"
        )
    device.bind(rank)
    listen_on_loopback()
    if not dist.is_initialized():
        if is_loopback(init_method):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
        dist.init_process_group(
            device.backend(), init_method=init_method, rank=rank, world_size=parallel.world_size, timeout=timeout
        )
    if dist.get_world_size() != parallel.world_size:
        raise UserError(
            f"the parallel sizes are for {parallel.world_size} ranks, but the job has {dist.get_world_size()}; start"
            " as many processes as the sizes ask for"
        )
    make_groups(parallel, timeout=timeout)


def make_groups(
    parallel: ParallelSizes,
    *,
    create_gloo_process_groups: bool = True,
    timeout: timedelta = TIMEOUT,
) -> None:
    """Create Megatron's groups and random number generators in a process that has joined its job."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        create_gloo_process_groups=create_gloo_process_groups,
        distributed_timeout_minutes=timeout / timedelta(minutes=1),
    )
    torch.manual_seed(_SEED)
    model_parallel_cuda_manual_seed(_SEED)


@contextmanager
def patient_barrier() -> Iterator[Callable[[], None]]:
    """Collective: a barrier with a timeout of 12 hours, for ranks that write files."""
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT_OF_FILES)
    try:
        yield lambda: dist.barrier(group)
    finally:
        dist.destroy_process_group(group)


def shutdown() -> None:
    """Destroy all groups; does nothing in a process that has none."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
