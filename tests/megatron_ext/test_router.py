"""Routers that score groups of experts as the model does, against the choice written out token by token."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from converters.errors import UserError
from megatron_ext.routing.router import build_router

TOKENS, EXPERTS, GROUPS, CHOSEN, TOPK = 50, 16, 4, 2, 5
SOFTMAX = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_num_groups=GROUPS,
        moe_router_group_topk=CHOSEN,
        moe_router_topk_scaling_factor=1.5,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        perform_initialization=False,
        **fields,
    )


# A router without auxiliary losses sends nothing to other ranks.
NO_GROUPS = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)


def random_logits() -> Tensor:
    return torch.randn(TOKENS, 1, EXPERTS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def expected_choice(scores: Tensor, best: int) -> Tensor:
    """Which experts each token takes, by `scores` [tokens, experts]."""
    size, chosen = EXPERTS // GROUPS, torch.zeros(scores.shape, dtype=torch.bool)
    for token, of_token in enumerate(scores.tolist()):
        groups = [range(first, first + size) for first in range(0, EXPERTS, size)]
        groups.sort(key=lambda group, s=of_token: sum(sorted((s[expert] for expert in group), reverse=True)[:best]))
        candidates = [expert for group in groups[-CHOSEN:] for expert in group]
        candidates.sort(key=lambda expert, s=of_token: s[expert])
        chosen[token, candidates[-TOPK:]] = True
    return chosen


@pytest.mark.parametrize("best", [1, 2, 3, 4])
def test_softmax_router_without_normalisation(best: int) -> None:
    router = build_router(config=config(**SOFTMAX), pg_collection=NO_GROUPS, experts_in_group_score=best)
    logits = random_logits().requires_grad_()
    weights, chosen = router.routing(logits)
    scores = logits[:, 0].float().softmax(-1).double()
    assert torch.equal(chosen, expected_choice(scores, best))
    expected = 1.5 * scores * chosen
    torch.testing.assert_close(weights, expected)
    upstream = torch.linspace(-1, 1, weights.numel(), dtype=weights.dtype).view_as(weights)
    torch.testing.assert_close(
        *(torch.autograd.grad(each, logits, upstream, retain_graph=True)[0] for each in (weights, expected))
    )


@pytest.mark.parametrize("best", [1, 2, 3, 4])
def test_sigmoid_router_with_expert_bias(best: int) -> None:
    router = build_router(config=config(**SIGMOID), pg_collection=NO_GROUPS, experts_in_group_score=best)
    # Negative for most experts: what is not chosen must lie below them all.
    router.expert_bias.copy_(
        torch.linspace(-3, 0.2, EXPERTS)[torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(4))]
    )
    logits = random_logits()
    weights, chosen = router.routing(logits)
    scores = logits[:, 0].float().sigmoid().double()
    assert torch.equal(chosen, expected_choice(scores + router.expert_bias, best))
    torch.testing.assert_close(weights, 1.5 * scores * chosen / (scores * chosen).sum(-1, keepdim=True))


def test_megatrons_own_router_scores_groups_by_its_own_rule() -> None:
    """If this fails after an update of megatron-core, look whether the extension is still needed."""
    _, chosen = TopKRouter(config=config(**SOFTMAX), pg_collection=NO_GROUPS).routing(random_logits())
    scores = random_logits()[:, 0].softmax(-1)
    assert torch.equal(chosen, expected_choice(scores, TOPK // CHOSEN))
    for best in (1, 3, 4):
        assert not torch.equal(chosen, expected_choice(scores, best))


def test_recorded_routing_is_replayed() -> None:
    router = build_router(
        config=config(**SOFTMAX, moe_enable_routing_replay=True), pg_collection=NO_GROUPS, experts_in_group_score=1
    )
    (replay,) = RouterReplay.global_router_replay_instances
    try:
        logits = random_logits()
        replay.set_router_replay_action(RouterReplayAction.RECORD)
        weights, chosen = router.routing(logits)
        assert torch.equal(chosen, expected_choice(logits[:, 0].softmax(-1), 1))
        replay.set_target_indices(replay.get_recorded_indices())
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        other_logits = logits.flip(0)
        other_weights, replayed = router.routing(other_logits)
        assert torch.equal(replayed, chosen)
        assert not torch.equal(other_weights, weights)
    finally:
        RouterReplay.clear_global_router_replay_instances()


def test_the_fused_router_is_refused() -> None:
    fused = config(**SOFTMAX, moe_router_fusion=True)
    with pytest.raises(UserError, match="moe_router_fusion cannot score a group of experts by its best 1"):
        build_router(config=fused, pg_collection=NO_GROUPS, experts_in_group_score=1)
