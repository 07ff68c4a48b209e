"""Simulates one rank of a vLLM engine, with process groups without peers and parameters without memory.

For vLLM 0.32.0 on a CPU; each patch replaces something that would need a peer. Rehearsals run in a process of their
own.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import kE2M1ToFloat_handle

_FAKE = "fake"


class WithoutMemory(TorchDispatchMode):
    """While active, uninitialised tensors have no memory until they get values; tensors made from values are real.

    vLLM's parameters are created uninitialised, while tables that its loaders read, such as the placement of experts,
    are made from values.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
        return func(*args, **kwargs)


@contextmanager
def fake_rank(config: VllmConfig, worker: int) -> Iterator[None]:
    """Within the context, this process is worker `worker` of an engine, in process groups without peers.

    The workers of a data-parallel rank have consecutive numbers.
    """
    parallel = config.parallel_config
    data_parallel, rank = divmod(worker, parallel.world_size)
    parallel.data_parallel_rank = parallel.data_parallel_index = data_parallel
    with ExitStack() as stack:
        for patched in _patches():
            stack.enter_context(patched)
        stack.enter_context(set_current_vllm_config(config))
        world = parallel.world_size * parallel.data_parallel_size
        dist.init_process_group(_FAKE, rank=worker, world_size=world, store=FakeStore())
        try:
            parallel_state.init_distributed_environment(parallel.world_size, rank, "env://", rank, backend=_FAKE)
            sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
            parallel_state.initialize_model_parallel(*sizes, backend=_FAKE)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _on_one_machine(group: Any, source_rank: int = 0) -> list[bool]:  # noqa: ARG001 - vLLM's signature
    return [True] * dist.get_world_size(group)


def _patches() -> list[Any]:
    new_group = dist.new_group

    def new_fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:  # noqa: ARG001
        # Gloo groups need peers.
        return new_group(ranks, backend=_FAKE, **options)

    return [
        patch.object(dist, "new_group", new_fake_group),
        # Ranks find those on the same machine through shared memory, and unpickle what they receive, which here would
        # be garbage.
        patch.object(parallel_state, "in_the_same_node_as", _on_one_machine),
        patch.object(MessageQueue, "create_from_process_group", staticmethod(lambda *_, **__: None)),
        # A process-wide table that NVFP4 layers move to their weights' device.
        patch.object(kE2M1ToFloat_handle, "val", kE2M1ToFloat_handle.val),
        patch.object(CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda _self: False),
    ]
