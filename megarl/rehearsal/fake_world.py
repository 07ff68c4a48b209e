"""One rank of a simulated world: process groups without peers, fake tensors.

Import this before anything from Megatron.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from megatron_ext import device

device.install()

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from converters.layouts.parallel_sizes import ParallelSizes  # noqa: E402
from megarl.rehearsal.known_values import KnownValues  # noqa: E402
from megatron_ext import parallel as groups  # noqa: E402

_GLOO = "_GLOO"
"""Suffix of the names of Megatron's host groups, each of which has a device group of the same ranks."""


@contextmanager
def fake_rank(parallel: ParallelSizes, rank: int) -> Iterator[None]:
    """Within the context, this process is `rank` of a world of `parallel.world_size`, with fake tensors.

    A collective returns at once, as if every other rank had the same data as this one. `KnownValues` keeps some values.
    """
    dist.init_process_group("fake", rank=rank, world_size=parallel.world_size, store=FakeStore())
    try:
        groups.make_groups(parallel, create_gloo_process_groups=False)
        _use_device_groups_on_host()
        with ExitStack() as stack:
            stack.enter_context(patch.object(dist, "all_gather_object", _all_gather_object))
            # Every tensor is on its device already, and torch cannot replace parameters without memory.
            stack.enter_context(patch.object(nn.Module, "to", _stay))
            stack.enter_context(FakeTensorMode())
            stack.enter_context(KnownValues())
            yield
    finally:
        groups.shutdown()


def _use_device_groups_on_host() -> None:
    # Gloo groups need peers.
    for name in [each for each in vars(parallel_state) if each.endswith(_GLOO)]:
        setattr(parallel_state, name, getattr(parallel_state, name.removesuffix(_GLOO)))


def _all_gather_object(gathered: list[Any], own: Any, group: Any = None) -> None:  # noqa: ARG001 - torch's signature
    gathered[:] = [own] * len(gathered)


def _stay(module: nn.Module, *_arguments: Any, **_options: Any) -> nn.Module:
    return module
