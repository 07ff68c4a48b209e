"""How many tokens the routers of a train step send to each expert."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.routing.router import prediction_routers, routers
from megatron_ext.routing.router_losses import RoutedTokens


class ExpertLoad:
    """Counts what every router of this rank's `chunks` chooses for the tokens of sequences, however they are cut.

    Rows that fill up a micro-batch are no tokens; a prefix that is computed once counts for each of its sequences.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], num_layers: int) -> None:
        self._chunks = chunks
        self._num_layers = num_layers
        self._counted: dict[int, _CountedTokens] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, every pass with a gradient is counted; see `router_balance.watch`.

        Megatron-core moves the biases of experts by the same counts. Raises RuntimeError where a router did not meet
        all that it was to count.
        """
        of_layers = [router for chunk in self._chunks for router in routers(chunk)]
        ahead = [router for chunk in self._chunks for router in prediction_routers(chunk)]
        counted = {router: _CountedTokens() for router in (*of_layers, *ahead)}
        self._counted = {router.layer_number - 1: counted[router] for router in of_layers}
        for router, tokens in counted.items():
            router.load = tokens
        try:
            yield
        finally:
            for router in counted:
                router.load = None
        if left := max((len(each.expected) for each in counted.values()), default=0):
            raise RuntimeError(f"a router left {left} micro-batches whose tokens it had to count")

    def take(self, num_experts: int, device: torch.device) -> Tensor:
        """Collective over all ranks of the model: int64[layers, experts] of the last step; 0 in other layers."""
        load = torch.zeros(self._num_layers, num_experts, dtype=torch.int64, device=device)
        for layer, counted in self._counted.items():
            load[layer] = counted.counts
        self._counted = {}
        dist.all_reduce(load)
        return load.cpu()


class _CountedTokens:
    """Counts the choices of one router.

    With a gradient each router runs once for each micro-batch, in their order, recomputed or not.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros((), dtype=torch.int64)
        self.expected: deque[Tensor] = deque()

    def expect(self, tokens: RoutedTokens) -> None:
        if torch.is_grad_enabled():
            self.expected.append(tokens.rows)

    def __call__(self, chosen: Tensor) -> Tensor:
        count = chosen.index_select(0, self.expected.popleft()).sum(0, dtype=torch.int64)
        self.counts = self.counts.to(count.device) + count
        return count
