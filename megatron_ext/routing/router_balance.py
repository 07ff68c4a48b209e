"""Adds router losses to the gradients of a train step, and counts the routers' choices beforehand if needed."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from torch import Tensor

from megatron_ext import device
from megatron_ext.packing.packing import MicroBatch
from megatron_ext.routing.router import (
    ExpertCount,
    ObservedRouter,
    RouterObserver,
    prediction_routers,
    require_all_met,
    routers,
)
from megatron_ext.routing.router_loss_options import RouterLosses
from megatron_ext.routing.router_losses import ROUTER_LOSSES, BatchTotals, Routed, RoutedTokens


class RouterBalance:
    """Adds the losses of all routers of this rank's `chunks` in train steps."""

    def __init__(self, chunks: Sequence[torch.nn.Module], losses: RouterLosses) -> None:
        self._chunks = chunks
        self._losses = losses
        self._values: Mapping[str, Tensor] = {}

    @contextmanager
    def step(self, lengths: Tensor, run_forward: Callable[[], object]) -> Iterator[None]:
        """Within the context, passes with a gradient add the losses of their micro-batches; see `expect_routed_tokens`.

        `lengths` are those of all sequences of this data-parallel rank. `run_forward` runs a forward pass of all its
        micro-batches without a gradient; it is called if a loss needs the choices of the whole batch. Collective.
        """
        if not self._losses:
            yield
            return
        totals = _totals(lengths)
        counts = self._count(run_forward) if self._losses.needs_counts else {}
        values: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))

        def observe(router: ObservedRouter) -> RouterObserver:
            return _AddedLosses(self._losses, totals, counts.get(router.layer_number), values)

        with _observed(self._chunks, observe):
            yield
        self._values = values

    def take(self) -> dict[str, float]:
        """Return the value of each loss in the last step, without its coefficient: the mean over layers with experts.

        Collective over all ranks of the model.
        """
        if not self._losses:
            return {}
        layers = sum(1 for chunk in self._chunks for _ in routers(chunk))
        # Ranks with the same layers have different tokens.
        share = torch.tensor(layers / dist.get_world_size(_all_tokens()), dtype=torch.float64)
        sums = torch.stack([*(self._values[name].cpu() for name in self._losses.coefficients), share])
        sums = sums.to(device.device())
        dist.all_reduce(sums)
        *values, of_layers = sums.tolist()
        if not of_layers:
            return {}
        return {name: value / of_layers for name, value in zip(self._losses.coefficients, values, strict=True)}

    def _count(self, run_forward: Callable[[], object]) -> dict[int, Tensor]:
        """Layer number -> int64[E], how often the tokens of all ranks choose each expert."""
        counted: dict[int, _ObservingCount] = {}

        def observe(router: ObservedRouter) -> RouterObserver:
            return counted.setdefault(router.layer_number, _ObservingCount())

        with _observed(self._chunks, observe):
            run_forward()
        for choices in counted.values():
            dist.all_reduce(choices.counts, group=_all_tokens())
        return {layer: choices.counts for layer, choices in counted.items()}


def expect_routed_tokens(chunk: torch.nn.Module, micro_batch: MicroBatch) -> None:
    """Announce the tokens of the chunk's next forward pass to the observers and counts of its routers."""
    of_mtp = [] if micro_batch.own.mtp is None else prediction_routers(chunk)
    for router in (*routers(chunk), *of_mtp):
        router.expect(micro_batch.routed)


class _AddedLosses:
    """Adds losses to the gradient of a router's probabilities, once per micro-batch.

    A recomputed layer runs twice, first without a gradient, and a schedule may run several micro-batches forward before
    the first runs backward. With a gradient, a router sees each micro-batch once, in order.
    """

    def __init__(
        self, losses: RouterLosses, totals: BatchTotals, counts: Tensor | None, values: dict[str, Tensor]
    ) -> None:
        self._losses = losses
        self._totals = totals
        self._counts = counts
        self._values = values
        self.expected: deque[RoutedTokens] = deque()

    def expect(self, tokens: RoutedTokens) -> None:
        self.expected.append(tokens)

    def __call__(self, router: ObservedRouter, logits: Tensor, probabilities: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return probabilities
        chosen, scores = _scored(router, logits)
        routed = Routed(
            self.expected.popleft(),
            logits.float(),
            chosen,
            scores,
            router.topk,
            self._totals,
            self._counts,
            parallel_state.get_tensor_and_context_parallel_group(),
        )
        for name, coefficient in self._losses.coefficients.items():
            loss = ROUTER_LOSSES[name](routed)
            self._values[name] = self._values[name] + loss.detach().double()
            probabilities = MoEAuxLossAutoScaler.apply(probabilities, coefficient * loss)
        return probabilities


class _ObservingCount(ExpertCount):
    """Counts the experts chosen in passes without a gradient, by the scores that the losses use."""

    def __call__(self, router: ObservedRouter, logits: Tensor, probabilities: Tensor) -> Tensor:
        chosen, _ = _scored(router, logits)
        self.add(chosen)
        return probabilities


def _scored(router: ObservedRouter, logits: Tensor) -> tuple[Tensor, Tensor]:
    return compute_routing_scores_for_aux_loss(logits.float(), router.topk, router.score_function)


@contextmanager
def _observed(chunks: Sequence[torch.nn.Module], observe: Callable[[ObservedRouter], RouterObserver]) -> Iterator[None]:
    """Within the context, each router has an observer. Raises RuntimeError if one missed a pass that it expected."""
    observers = {}
    for chunk in chunks:
        for router in routers(chunk):
            router.observer = observers[router] = observe(router)
    try:
        yield
        require_all_met((each.expected for each in observers.values()), "whose losses it had to add")
    finally:
        for router in observers:
            router.observer = None


def _totals(lengths: Tensor) -> BatchTotals:
    totals = torch.tensor([int(lengths.sum()), len(lengths)], device=device.device())
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    tokens, sequences = totals.tolist()
    return BatchTotals(tokens, sequences)


def _all_tokens() -> dist.ProcessGroup:
    """The ranks that together have all tokens for this rank's layers."""
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def routed_tokens(micro_batch: MicroBatch, *, sequence_parallel: bool) -> RoutedTokens:
    """The real tokens of `micro_batch` that routers of this rank see.

    Call it before the micro-batch is moved to a device: the shapes depend on values, which would synchronize with it.
    """
    rows, tokens = micro_batch.own.rows()
    is_real = tokens < micro_batch.real_tokens
    first = 0
    if sequence_parallel:
        share = micro_batch.own.tokens.shape[1] // parallel_state.get_tensor_model_parallel_world_size()
        first = share * parallel_state.get_tensor_model_parallel_rank()
        is_real &= (rows >= first) & (rows < first + share)
    numbers = torch.arange(len(micro_batch.lengths), device=rows.device)
    sequence_of = numbers.repeat_interleave(micro_batch.lengths, output_size=micro_batch.real_tokens)
    return RoutedTokens(rows[is_real] - first, sequence_of[tokens[is_real]], micro_batch.lengths)
