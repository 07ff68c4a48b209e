"""Counts how many tokens the routers send to each expert in a train step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.routing.router import ExpertCount, prediction_routers, require_all_met, routers


class ExpertLoad:
    """Counts the choices of every router of this rank's `chunks`, independently of how the batch is split.

    Padding does not count; a shared prefix, computed once, counts for each of its sequences.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], num_layers: int) -> None:
        self._chunks = chunks
        self._num_layers = num_layers
        self._counted: dict[int, ExpertCount] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within the context, count every micro-batch of passes with a gradient once, whether recomputed or not.

        megatron-core updates the expert biases with the same counts. Raises RuntimeError if a router did not see all
        micro-batches that it was to count.
        """
        of_layers = [router for chunk in self._chunks for router in routers(chunk)]
        of_mtp = [router for chunk in self._chunks for router in prediction_routers(chunk)]
        counted = {router: ExpertCount() for router in (*of_layers, *of_mtp)}
        self._counted = {router.layer_number - 1: counted[router] for router in of_layers}
        for router, count in counted.items():
            router.load = count
        try:
            yield
            require_all_met((each.expected for each in counted.values()), "whose tokens it had to count")
        finally:
            for router in counted:
                router.load = None

    def take(self, num_experts: int, device: torch.device) -> Tensor:
        """Collective over all ranks: the last step's int64[layers, experts]; 0 for layers without experts."""
        load = torch.zeros(self._num_layers, num_experts, dtype=torch.int64, device=device)
        for layer, counted in self._counted.items():
            load[layer] = counted.counts
        self._counted = {}
        dist.all_reduce(load)
        return load.cpu()
