"""DeepSeek-V2, V2-Lite and Coder-V2 (arXiv 2405.04434): latent attention, softmax router, shared experts."""

from collections.abc import Sequence
from typing import Any

from converters.architectures import deepseek
from converters.architectures.blocks import embedding_and_output
from converters.architectures.common import expert_routing, layer_pattern, rms_norm_decoder, tied_copies
from converters.architectures.extensions import Extensions
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.routing import expert_groups, group_scores
from converters.architectures.weight_map import Architecture

MODEL_TYPES = ("deepseek_v2",)

_GROUP_SCORE_EXPERTS = 1


def read(config: HuggingFaceConfig) -> Architecture:
    """The Megatron model of a DeepSeek-V2 config.json."""
    layers = range(config["num_hidden_layers"])
    moe_layers = [layer for layer in layers if deepseek.has_experts(config, layer)]
    return Architecture(
        model_type=config["model_type"],
        hf_config=config.fields,
        transformer_config={
            **rms_norm_decoder(config),
            **deepseek.latent_attention_fields(config),
            **(_routing(config, moe_layers) if moe_layers else {}),
        },
        gpt_model=deepseek.gpt_model_arguments(config),
        multi_latent_attention=True,
        num_experts=config.num_experts if moe_layers else 0,
        dimensions=deepseek.dimensions(config),
        weight_map=(
            *embedding_and_output(tied=config.tied),
            *deepseek.decoder_layers(config, layers, moe_layers, expert_bias=False),
        ),
        hf_copies=tied_copies(config),
        extensions=_routing_extensions(config, moe_layers),
    )


def _routing(config: HuggingFaceConfig, moe_layers: Sequence[int]) -> dict[str, Any]:
    config.require("scoring_func", ("softmax",), "softmax")
    config.require("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    config.require("norm_topk_prob", (False,), False)
    shared = config["moe_intermediate_size"] * config.get("n_shared_experts", 0)
    return {
        **expert_routing(config),
        **(expert_groups(config, scoring=_GROUP_SCORE_EXPERTS) if _has_expert_groups(config) else {}),
        "moe_layer_freq": layer_pattern(moe_layers, config["num_hidden_layers"]),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 1.0),
        **({"moe_shared_expert_intermediate_size": shared} if shared else {}),
    }


def _routing_extensions(config: HuggingFaceConfig, moe_layers: Sequence[int]) -> Extensions:
    limited = moe_layers and _has_expert_groups(config)
    return group_scores(config, scoring=_GROUP_SCORE_EXPERTS) if limited else Extensions()


def _has_expert_groups(config: HuggingFaceConfig) -> bool:
    return config.get("topk_method", "greedy") == "group_limited_greedy"
