"""DeepSeek-V3 (arXiv 2412.19437): multi-head latent attention, sigmoid router with expert bias, shared experts."""

from typing import Any

from converters.architectures.blocks import dense_mlp, embedding_and_output, latent_attention, mixture_of_experts
from converters.architectures.common import rms_norm_decoder
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.multi_token_prediction import multi_token_prediction
from converters.architectures.sigmoid_router import sigmoid_routing
from converters.architectures.weight_map import Architecture, Dimension, Parameter

MODEL_TYPES = ("deepseek_v3",)

_YARN_FIELDS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def read(config: HuggingFaceConfig) -> Architecture:
    """The Megatron model of a DeepSeek-V3 config.json."""
    config.require("attention_bias", (False,), False)
    config.require("rope_interleave", (True,), True)
    config.require("moe_layer_freq", (1,), 1)
    layers = range(config["num_hidden_layers"])
    moe_layers = layers[config["first_k_dense_replace"] :]
    tied = config.get("tie_word_embeddings", False)
    mtp_layers = range(len(layers), len(layers) + config.get("num_nextn_predict_layers", 0))
    mtp = multi_token_prediction(
        _layers(config, mtp_layers, mtp_layers if len(layers) - 1 in moe_layers else range(0)),
        mtp_layers,
        hidden_size=config["hidden_size"],
        tied=tied,
    )
    return Architecture(
        model_type=config["model_type"],
        hf_config=config.fields,
        transformer_config={
            **rms_norm_decoder(config),
            **_attention(config),
            **(sigmoid_routing(config, moe_layers) if moe_layers else {}),
            **mtp.transformer_config,
        },
        gpt_model={
            "vocab_size": config["vocab_size"],
            "max_sequence_length": config["max_position_embeddings"],
            "position_embedding_type": "rope",
            "rotary_base": config.rope["rope_theta"],
            "rotary_percent": 1.0,
            "share_embeddings_and_output_weights": tied,
        },
        multi_latent_attention=True,
        num_experts=config.num_experts if moe_layers else 0,
        dimensions={**_dimensions(config), **mtp.dimensions},
        weight_map=(*embedding_and_output(tied=tied), *_layers(config, layers, moe_layers), *mtp.weight_map),
        hf_copies={**({"lm_head.weight": "model.embed_tokens.weight"} if tied else {}), **mtp.hf_copies},
        exported_copies=tuple(mtp.hf_copies),
        mtp_layers=len(mtp_layers),
    )


def _layers(config: HuggingFaceConfig, layers: range, moe_layers: range) -> tuple[Parameter, ...]:
    return (
        *latent_attention(layers, low_rank_query=config.get("q_lora_rank", None) is not None),
        *dense_mlp(set(layers) - set(moe_layers)),
        *mixture_of_experts(moe_layers, expert_bias=True, shared_experts=config.get("n_shared_experts", 0) > 0),
    )


def _attention(config: HuggingFaceConfig) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "num_query_groups": config["num_attention_heads"],
        "qk_layernorm": True,
        "q_lora_rank": config.get("q_lora_rank", None),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        **_rotary(config),
    }


def _rotary(config: HuggingFaceConfig) -> dict[str, Any]:
    rope = config.rope
    base, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    if kind == "default":
        return {"rope_type": "rope", "rotary_base": base, "rotary_percent": 1.0, "rotary_scaling_factor": 1.0}
    if kind != "yarn":
        raise config.error(f"has a rotary embedding of type {kind!r}, only 'default' and 'yarn' are supported")
    if unknown := sorted(rope.keys() - set(_YARN_FIELDS)):
        raise config.error(f"has the yarn parameter {unknown[0]}, which is not supported")
    if missing := [name for name in _YARN_FIELDS[:2] if rope.get(name) is None]:
        raise config.error(f"has no yarn parameter {missing[0]}")
    if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
        raise config.error("has only one of the yarn parameters mscale and mscale_all_dim, which is not supported")
    return {
        "rope_type": "yarn",
        "rotary_base": base,
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope.get("mscale") or 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def _dimensions(config: HuggingFaceConfig) -> dict[str, Dimension]:
    heads, rope = config["num_attention_heads"], config["qk_rope_head_dim"]
    nope, value, latent = config["qk_nope_head_dim"], config["v_head_dim"], config["kv_lora_rank"]
    dimensions = {
        "vocabulary": Dimension("vocab_size", config["vocab_size"]),
        "hidden": Dimension("hidden_size", config["hidden_size"]),
        "query": Dimension("num_attention_heads", heads, nope + rope),
        "query_latent": Dimension("q_lora_rank", config.get("q_lora_rank", 0)),
        "key_value_latent": Dimension("kv_lora_rank", latent),
        "key_value_latent_and_rope": Dimension("kv_lora_rank", latent + rope),
        "key_value_up": Dimension("num_attention_heads", heads, nope + value),
        "value": Dimension("num_attention_heads", heads, value),
        "ffn": Dimension("intermediate_size", config["intermediate_size"]),
        "experts": Dimension("n_routed_experts", config.num_experts),
        "expert_ffn": Dimension("moe_intermediate_size", config["moe_intermediate_size"]),
    }
    if shared := config.get("n_shared_experts", 0):
        dimensions["shared_expert_ffn"] = Dimension("moe_intermediate_size", config["moe_intermediate_size"] * shared)
    return dimensions
