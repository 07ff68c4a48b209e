"""Megatron's configuration for features shared by many architectures."""

from collections.abc import Mapping, Sequence
from typing import Any

from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.weight_map import Dimension
from converters.errors import nearest_sizes


def rms_norm_decoder(config: HuggingFaceConfig) -> dict[str, Any]:
    """TransformerConfig fields of a pre-norm decoder with RMS norms, gated MLPs, and no bias or dropout."""
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "gated_linear_unit": True,
        "activation_func": config.activation,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def grouped_queries(config: HuggingFaceConfig, head_dim: int) -> dict[str, int]:
    """TransformerConfig fields of grouped-query attention with heads of width `head_dim`.

    Raises UserError if the key-value heads do not divide the heads.
    """
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % groups:
        nearest = nearest_sizes(groups, lambda size: heads % size == 0, heads)
        raise config.error(
            f"has num_key_value_heads = {groups}, which does not divide num_attention_heads = {heads}; change it to"
            f" {nearest}"
        )
    return {"num_query_groups": groups, "kv_channels": head_dim}


def gpt_model(config: HuggingFaceConfig, rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of GPTModel; `rotary` are those of the position embedding."""
    return {
        "vocab_size": config["vocab_size"],
        "max_sequence_length": config["max_position_embeddings"],
        **rotary,
        "share_embeddings_and_output_weights": config.tied,
    }


def decoder_dimensions(config: HuggingFaceConfig, head_dim: int) -> dict[str, Dimension]:
    """Named lengths of the embedding, of grouped-query attention with heads of width `head_dim`, and of dense MLPs."""
    return {
        "vocabulary": Dimension("vocab_size", config["vocab_size"]),
        "hidden": Dimension("hidden_size", config["hidden_size"]),
        "head": Dimension("head_dim", head_dim),
        "query": Dimension("num_attention_heads", config["num_attention_heads"], head_dim),
        "key_value": Dimension("num_key_value_heads", config["num_key_value_heads"], head_dim),
        "ffn": Dimension("intermediate_size", config["intermediate_size"]),
    }


def expert_dimensions(config: HuggingFaceConfig, *, width: str = "moe_intermediate_size") -> dict[str, Dimension]:
    """Named lengths of a mixture of experts; `width` is the field of config.json with the width of an expert."""
    return {
        "experts": Dimension("num_experts", config.num_experts),
        "expert_ffn": Dimension(width, config[width]),
        "shared_expert_ffn": Dimension(width, config[width] * config.get("n_shared_experts", 0)),
    }


def tied_copies(config: HuggingFaceConfig) -> dict[str, str]:
    """`Architecture.hf_copies` of an output layer that is tied to the embedding."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tied else {}


def refuse_sliding_window(config: HuggingFaceConfig) -> None:
    """Raise UserError if some layer uses sliding-window attention."""
    config.require("use_sliding_window", (False,), False)
    if set(types := config.get("layer_types", [])) - {"full_attention"}:
        raise config.error(f"has layer_types {sorted(set(types))}, which are not supported: only full_attention is")


def expert_routing(config: HuggingFaceConfig, *, width: str = "moe_intermediate_size") -> dict[str, Any]:
    """TransformerConfig fields of a mixture of experts that drops no token and has no balancing loss.

    `width` is the field of config.json with the width of an expert. Raises UserError if a token has a single expert, or
    more than there are.
    """
    experts, topk = config.num_experts, config["num_experts_per_tok"]
    if topk < 2:
        raise config.error("has num_experts_per_tok = 1; Megatron does not normalise the weight of a single expert")
    if topk > experts:
        raise config.error(f"has num_experts_per_tok = {topk} of {experts} experts; change it to at most {experts}")
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": config[width],
        "moe_router_topk": topk,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }


def layer_pattern(moe_layers: Sequence[int], num_layers: int) -> int | list[int]:
    """`moe_layer_freq`: 1 if every layer is a mixture of experts, else 1 or 0 per layer.

    Megatron's distributed checkpoints name the parameters of uniform layers differently, hence the 1.
    """
    pattern = [int(layer in moe_layers) for layer in range(num_layers)]
    return pattern if 0 in pattern else 1
