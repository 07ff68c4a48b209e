"""Qwen3, dense and mixture-of-experts (arXiv 2505.09388)."""

from typing import Any

from converters.architectures.blocks import (
    dense_mlp,
    embedding_and_output,
    grouped_query_attention,
    mixture_of_experts,
)
from converters.architectures.common import (
    decoder_dimensions,
    expert_dimensions,
    expert_routing,
    gpt_model,
    grouped_queries,
    layer_pattern,
    refuse_sliding_window,
    rms_norm_decoder,
    tied_copies,
)
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.rotary import rotary_embedding
from converters.architectures.weight_map import Architecture

MODEL_TYPES = ("qwen3", "qwen3_moe")


def read(config: HuggingFaceConfig) -> Architecture:
    """The Megatron model of a Qwen3 config.json."""
    config.require("attention_bias", (False,), False)
    refuse_sliding_window(config)
    # Dual chunk attention, which the config.json for a context of a million tokens asks for.
    config.require("dual_chunk_attention_config", (None,), None)
    is_moe = config["model_type"] == "qwen3_moe"
    moe_layers = _moe_layers(config) if is_moe else []
    layers = range(config["num_hidden_layers"])
    return Architecture(
        model_type=config["model_type"],
        hf_config=config.fields,
        transformer_config={
            **rms_norm_decoder(config),
            **grouped_queries(config, config["head_dim"]),
            "qk_layernorm": True,
            **(_routing(config, moe_layers) if moe_layers else {}),
        },
        gpt_model=gpt_model(config, rotary_embedding(config)),
        multi_latent_attention=False,
        num_experts=config.num_experts if moe_layers else 0,
        dimensions={
            **decoder_dimensions(config, config["head_dim"]),
            **(expert_dimensions(config) if is_moe else {}),
        },
        weight_map=(
            *embedding_and_output(tied=config.tied),
            *grouped_query_attention(layers, qk_norm=True),
            *dense_mlp(set(layers) - set(moe_layers)),
            *mixture_of_experts(moe_layers),
        ),
        hf_copies=tied_copies(config),
    )


def _moe_layers(config: HuggingFaceConfig) -> list[int]:
    dense, step = config.get("mlp_only_layers", []), config.get("decoder_sparse_step", 1)
    return [layer for layer in range(config["num_hidden_layers"]) if layer not in dense and (layer + 1) % step == 0]


def _routing(config: HuggingFaceConfig, moe_layers: list[int]) -> dict[str, Any]:
    return {
        **expert_routing(config),
        "moe_layer_freq": layer_pattern(moe_layers, config["num_hidden_layers"]),
        "moe_router_score_function": "softmax",
        # A softmax over all experts, renormalised over the chosen ones, is the softmax over the chosen ones.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }
