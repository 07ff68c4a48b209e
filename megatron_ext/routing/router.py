"""Routers with the model's own scores of expert groups, which observers may watch in every pass."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from converters.architectures.extensions import Extensions
from converters.errors import UserError
from megatron_ext import versions
from megatron_ext.routing.router_losses import RoutedTokens

Choice = tuple[Tensor, Tensor]
"""The scores and the indices of each token's experts, both [tokens, topk]."""


class RouterObserver(Protocol):
    """Is called in each forward pass of a router, and may add to its gradient."""

    @property
    def expected(self) -> Sized:
        """The micro-batches that it expects and has not seen yet."""
        ...

    def expect(self, tokens: RoutedTokens) -> None:
        """Prepare for the micro-batch of the router's next forward pass."""
        ...

    def __call__(self, router: "ObservedRouter", logits: Tensor, probabilities: Tensor) -> Tensor:
        """Return the `probabilities` to continue with, computed from `logits`; all are [tokens, experts]."""
        ...


class ExpertCount:
    """Counts how often tokens of the expected micro-batches choose each expert of one router."""

    def __init__(self) -> None:
        self.counts = torch.zeros((), dtype=torch.int64)
        """int64[experts] after the first micro-batch; a scalar 0 before."""
        self.expected: deque[Tensor] = deque()
        """For each micro-batch that was not seen yet, the rows of its tokens."""

    def expect(self, tokens: RoutedTokens) -> None:
        """Prepare for the micro-batch of the router's next forward pass."""
        self.expected.append(tokens.rows)

    def add(self, chosen: Tensor) -> Tensor:
        """Add the next micro-batch's choices, bool[rows, experts]; return its own counts, int64[experts]."""
        count = chosen.index_select(0, self.expected.popleft()).sum(0, dtype=torch.int64)
        self.counts = self.counts.to(count.device) + count
        return count


def require_all_met(expected: Iterable[Sized], purpose: str) -> None:
    """Raise RuntimeError if a router has not seen all `expected` micro-batches; `purpose` completes the message.

    Example: require_all_met([count.expected], "whose tokens it had to count")
    """
    if left := max(map(len, expected), default=0):
        raise RuntimeError(f"a router left {left} micro-batches {purpose}")


class ObservedRouter(TopKRouter):
    """megatron-core's router, with an optional observer and an optional count of its load."""

    observer: RouterObserver | None = None
    load: ExpertCount | None = None
    """Counts the choices in passes with a gradient."""

    def expect(self, tokens: RoutedTokens | None) -> None:
        """Announce the tokens of the next forward pass to the observer and the count; None if there are neither."""
        for each in (self.observer, self.load if torch.is_grad_enabled() else None):
            if each is not None:
                assert tokens is not None
                each.expect(tokens)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return probabilities and choice, both [tokens, experts], for the `logits` [tokens, batch, experts]."""
        probabilities, chosen = super().routing(logits, padding_mask)
        if self.observer is not None:
            probabilities = self.observer(self, logits.flatten(0, 1), probabilities)
        return probabilities, chosen

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        # megatron-core would also count padding for the biases, whose amount depends on how the batch is split.
        if self.load is None:
            super()._apply_expert_bias(routing_map, padding_mask)
        elif torch.is_grad_enabled():
            count = self.load.add(routing_map)
            if self.enable_expert_bias:
                self.local_tokens_per_expert += count


def routers(chunk: torch.nn.Module) -> Iterator[ObservedRouter]:
    """The routers of the decoder layers in a chunk, in order, without those of prediction layers."""
    for layer in unwrap_model(chunk).decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            yield router


def prediction_routers(chunk: torch.nn.Module) -> list[ObservedRouter]:
    """The routers of the prediction layers in a chunk."""
    layers = getattr(unwrap_model(chunk), "mtp", None)
    return [] if layers is None else [each for each in layers.modules() if isinstance(each, ObservedRouter)]


def freeze_routers(chunks: Sequence[torch.nn.Module]) -> None:
    """Freeze all routers; call before wrapping in DDP."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, TopKRouter):
            module.requires_grad_(False)


def extend_router(layer: ModuleSpec, extensions: Extensions) -> ModuleSpec:
    """Replace the router of a layer of any specs, if it has one, by one that can be observed and has `extensions`."""
    mlp = layer.submodules.mlp
    if versions.module_of(mlp) is not MoELayer:
        return layer
    router = partial(build_router, experts_in_group_score=extensions.experts_in_group_score)
    return versions.with_submodules(layer, mlp=versions.with_submodules(mlp, router=router))


@dataclass
class GroupScoredChoice:
    """A router's choice of experts, with the model's own scores of groups.

    It takes the place of megatron-core's `RouterReplay`, the only place where megatron-core 0.16.1 can be made to
    choose by anything other than its `group_limited_topk`. A replay of routing still works, through `replay`.
    """

    experts_in_group_score: int
    replay: RouterReplay | None
    layer_number: int | None = None
    """Set by the routers of megatron-core 0.19."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int,
        group_topk: int,
        default_compute_topk: Callable[[Tensor, int], Choice],
    ) -> Choice:
        """Choose each token's `topk` experts from its best `group_topk` groups; `scores` is [tokens, experts]."""

        def choose(scores: Tensor, topk: int, num_groups: int, group_topk: int) -> Choice:
            others = ~in_best_groups(scores, num_groups, group_topk, self.experts_in_group_score)
            return default_compute_topk(scores.masked_fill(others, float("-inf")), topk)

        if self.replay is None:
            return choose(scores, topk, num_groups, group_topk)
        return self.replay.get_replay_topk(scores, topk, num_groups, group_topk, choose)


def in_best_groups(scores: Tensor, num_groups: int, group_topk: int, experts_in_group_score: int) -> Tensor:
    """bool[tokens, experts]: whether each expert is in one of the token's best groups, by `scores`, same shape."""
    grouped = scores.detach().unflatten(1, (num_groups, -1))
    group_scores = grouped.topk(experts_in_group_score, dim=-1).values.sum(-1)
    best = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, group_scores.topk(group_topk).indices, True)
    return best[..., None].expand_as(grouped).flatten(1)


def build_router(
    *,
    config: TransformerConfig,
    pg_collection: ProcessGroupCollection | None,
    experts_in_group_score: int | None,
    **options: Any,
) -> ObservedRouter:
    """Build a router that scores a group by the sum of its best `experts_in_group_score`; None for Megatron's rule.

    Raises UserError for `moe_router_fusion`, whose kernel only supports megatron-core's group scores.
    """
    router = ObservedRouter(config=config, pg_collection=pg_collection, **options)
    if experts_in_group_score is None:
        return router
    if config.moe_router_fusion:
        raise UserError(
            f"megatron.moe_router_fusion cannot score a group of experts by its best {experts_in_group_score}, as this"
            " model does; leave it out"
        )
    router.router_replay = GroupScoredChoice(experts_in_group_score, router.router_replay)
    return router
