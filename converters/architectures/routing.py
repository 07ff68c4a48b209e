"""Routers of experts: groups that limit a token's choice, and the sigmoid router of DeepSeek-V3.

Group-limited routing is that of DeepSeek-V2 (arXiv 2405.04434, section 2.2.2): a token's experts come from a few of the
groups. GLM-4.5 and Kimi-K2 have the sigmoid router (arXiv 2412.19437, section 2.1.2) as well.
"""

from collections.abc import Sequence
from typing import Any

from converters.architectures.common import expert_routing, layer_pattern
from converters.architectures.extensions import Extensions
from converters.architectures.hf_config import HuggingFaceConfig

# Number of best experts by which the sigmoid router scores a group.
_GROUP_SCORE_EXPERTS = 2


def expert_groups(config: HuggingFaceConfig, *, scoring: int) -> dict[str, int]:
    """TransformerConfig fields that limit a token to the best `topk_group` of `n_group` groups of experts.

    The family scores a group by the sum of its `scoring` best experts: see `group_scores`. Raises UserError if the
    groups cannot be formed or scored, or cannot hold a token's experts.
    """
    groups, chosen = _groups(config)
    if groups == chosen:
        return {}
    topk = config["num_experts_per_tok"]
    if not 0 < chosen < groups or config.num_experts % groups or topk > chosen * (config.num_experts // groups):
        raise config.error(
            f"chooses {topk} of {config.num_experts} experts in {chosen} of {groups} groups (num_experts_per_tok,"
            " n_routed_experts, topk_group, n_group), which is not possible"
        )
    if scoring > config.num_experts // groups:
        raise config.error(
            f"scores a group by its best {scoring} experts, but its groups (n_group) hold"
            f" {config.num_experts // groups} of {config.num_experts}"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def group_scores(config: HuggingFaceConfig, *, scoring: int) -> Extensions:
    """The extension that scores groups by their `scoring` best experts, if Megatron would sum another number."""
    groups, chosen = _groups(config)
    if groups == chosen or config["num_experts_per_tok"] // chosen == scoring:
        return Extensions()
    return Extensions(experts_in_group_score=scoring)


def _groups(config: HuggingFaceConfig) -> tuple[int, int]:
    return config.get("n_group", 1), config.get("topk_group", 1)


def sigmoid_routing(config: HuggingFaceConfig, moe_layers: Sequence[int]) -> dict[str, Any]:
    """TransformerConfig fields of sigmoid scores, a balancing bias, normalised weights, groups and shared experts."""
    config.require("scoring_func", ("sigmoid",), "sigmoid")
    config.require("topk_method", ("noaux_tc",), "noaux_tc")
    config.require("norm_topk_prob", (True,), True)
    shared = config["moe_intermediate_size"] * config.get("n_shared_experts", 0)
    return {
        **expert_routing(config),
        **expert_groups(config, scoring=_GROUP_SCORE_EXPERTS),
        "moe_layer_freq": layer_pattern(moe_layers, config["num_hidden_layers"]),
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 1.0),
        **({"moe_shared_expert_intermediate_size": shared} if shared else {}),
    }


def sigmoid_routing_extensions(config: HuggingFaceConfig, moe_layers: Sequence[int]) -> Extensions:
    """Computations of this router beyond megatron-core's."""
    return group_scores(config, scoring=_GROUP_SCORE_EXPERTS) if moe_layers else Extensions()
