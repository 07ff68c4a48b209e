"""Group-limited routing with groups of experts scored as the model scores them, whatever megatron-core's number is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from converters.architectures.extensions import Extensions
from converters.errors import UserError

Choice = tuple[Tensor, Tensor]
"""The scores and the indices of each token's experts: [tokens, topk] both."""


def extend_router(layer: ModuleSpec, extensions: Extensions) -> ModuleSpec:
    """A layer of any specs whose router, where it has one, scores groups of experts as wanted."""
    mlp = layer.submodules.mlp
    if extensions.experts_in_group_score is None or mlp.module is not MoELayer:
        return layer
    router = partial(build_group_scoring_router, experts_in_group_score=extensions.experts_in_group_score)
    routed = replace(mlp, submodules=replace(mlp.submodules, router=router))
    return replace(layer, submodules=replace(layer.submodules, mlp=routed))


@dataclass(frozen=True)
class GroupScoredChoice:
    """A router's choice of experts. It stands where megatron-core keeps a `RouterReplay`: the only place in which
    megatron-core 0.16.1 lets anything but its own `group_limited_topk` choose. A replay of routing goes on as it was.
    """

    experts_in_group_score: int
    replay: RouterReplay | None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int,
        group_topk: int,
        default_compute_topk: Callable[[Tensor, int], Choice],
    ) -> Choice:
        """Each token's `topk` experts of its best `group_topk` groups; `scores` is [tokens, experts]."""

        def choose(scores: Tensor, topk: int, num_groups: int, group_topk: int) -> Choice:
            others = ~in_best_groups(scores, num_groups, group_topk, self.experts_in_group_score)
            return default_compute_topk(scores.masked_fill(others, float("-inf")), topk)

        if self.replay is None:
            return choose(scores, topk, num_groups, group_topk)
        return self.replay.get_replay_topk(scores, topk, num_groups, group_topk, choose)


def in_best_groups(scores: Tensor, num_groups: int, group_topk: int, experts_in_group_score: int) -> Tensor:
    """Whether each expert is in one of its token's best groups, by `scores`; both are [tokens, experts]."""
    grouped = scores.detach().unflatten(1, (num_groups, -1))
    group_scores = grouped.topk(experts_in_group_score, dim=-1).values.sum(-1)
    best = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, group_scores.topk(group_topk).indices, True)
    return best[..., None].expand_as(grouped).flatten(1)


def build_group_scoring_router(
    *, config: TransformerConfig, pg_collection: ProcessGroupCollection | None, experts_in_group_score: int
) -> TopKRouter:
    """A router that scores a group of experts by the sum of its best `experts_in_group_score`.

    Raises UserError for `moe_router_fusion`, whose kernel knows megatron-core's group scores alone.
    """
    if config.moe_router_fusion:
        raise UserError(
            f"megatron.moe_router_fusion cannot score a group of experts by its best {experts_in_group_score}, as this"
            " model does; leave it out"
        )
    router = TopKRouter(config=config, pg_collection=pg_collection)
    router.router_replay = GroupScoredChoice(experts_in_group_score, router.router_replay)
    return router
