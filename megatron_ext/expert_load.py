"""How many tokens the routers of a train step send to each expert."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_ext.router import routers


class ExpertLoad:
    """Counts what every router of this rank's `chunks` chooses, padding of the alignment included."""

    def __init__(self, chunks: Sequence[torch.nn.Module], num_layers: int) -> None:
        self._num_layers = num_layers
        self._counts: dict[int, Tensor] = {}
        for router in (router for chunk in chunks for router in routers(chunk)):
            router.register_forward_hook(partial(self._count, router.layer_number - 1))

    def _count(self, layer: int, _router: TopKRouter, _inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
        # With a gradient each layer runs once, recomputed or not; without any it is no train step.
        if torch.is_grad_enabled():
            count = outputs[1].sum(0, dtype=torch.int64)
            self._counts[layer] = self._counts[layer] + count if layer in self._counts else count

    def take(self, num_experts: int, device: torch.device) -> Tensor:
        """Collective over all ranks of the model: int64[layers, experts] since the last call; 0 in other layers."""
        load = torch.zeros(self._num_layers, num_experts, dtype=torch.int64, device=device)
        for layer, count in self._counts.items():
            load[layer] = count
        self._counts = {}
        dist.all_reduce(load)
        return load.cpu()
