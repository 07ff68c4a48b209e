"""The router of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), which GLM-4.5 and Kimi-K2 have as well."""

from collections.abc import Sequence
from typing import Any

from converters.architectures.common import expert_routing, layer_pattern
from converters.architectures.expert_groups import expert_groups, group_scores
from converters.architectures.extensions import Extensions
from converters.architectures.hf_config import HuggingFaceConfig

_GROUP_SCORE_EXPERTS = 2


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
