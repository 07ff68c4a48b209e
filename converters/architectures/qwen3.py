"""Qwen3, dense and mixture-of-experts (arXiv 2505.09388)."""

from typing import Any

from converters.architectures.blocks import (
    dense_mlp,
    embedding_and_output,
    grouped_query_attention,
    mixture_of_experts,
)
from converters.architectures.common import expert_routing, layer_pattern, rms_norm_decoder
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.weight_map import Architecture, Dimension

MODEL_TYPES = ("qwen3", "qwen3_moe")


def read(config: HuggingFaceConfig) -> Architecture:
    """The Megatron model of a Qwen3 config.json."""
    config.require("attention_bias", (False,), False)
    config.require("use_sliding_window", (False,), False)
    rope = config.rope
    if rope["rope_type"] != "default":
        raise config.error(f"has a rotary embedding of type {rope['rope_type']!r}, only 'default' is supported")
    experts = config.num_experts if config["model_type"] == "qwen3_moe" else 0
    moe_layers = _moe_layers(config) if experts else []
    layers = range(config["num_hidden_layers"])
    tied = config.get("tie_word_embeddings", False)
    return Architecture(
        model_type=config["model_type"],
        hf_config=config.fields,
        transformer_config={
            **rms_norm_decoder(config),
            "num_query_groups": config["num_key_value_heads"],
            "kv_channels": config["head_dim"],
            "qk_layernorm": True,
            **(_routing(config, moe_layers) if moe_layers else {}),
        },
        gpt_model={
            "vocab_size": config["vocab_size"],
            "max_sequence_length": config["max_position_embeddings"],
            "position_embedding_type": "rope",
            "rotary_base": rope["rope_theta"],
            "rotary_percent": 1.0,
            "share_embeddings_and_output_weights": tied,
        },
        multi_latent_attention=False,
        num_experts=experts if moe_layers else 0,
        dimensions=_dimensions(config),
        weight_map=(
            *embedding_and_output(tied=tied),
            *grouped_query_attention(layers, qk_norm=True),
            *dense_mlp(set(layers) - set(moe_layers)),
            *mixture_of_experts(moe_layers, expert_bias=False, shared_experts=False),
        ),
        hf_copies={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
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


def _dimensions(config: HuggingFaceConfig) -> dict[str, Dimension]:
    head = config["head_dim"]
    dimensions = {
        "vocabulary": Dimension("vocab_size", config["vocab_size"]),
        "hidden": Dimension("hidden_size", config["hidden_size"]),
        "head": Dimension("head_dim", head),
        "query": Dimension("num_attention_heads", config["num_attention_heads"], head),
        "key_value": Dimension("num_key_value_heads", config["num_key_value_heads"], head),
        "ffn": Dimension("intermediate_size", config["intermediate_size"]),
    }
    if config["model_type"] == "qwen3_moe":
        dimensions["experts"] = Dimension("num_experts", config.num_experts)
        dimensions["expert_ffn"] = Dimension("moe_intermediate_size", config["moe_intermediate_size"])
    return dimensions
