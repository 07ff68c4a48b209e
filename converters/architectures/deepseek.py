"""Common part of DeepSeek-V2 and its successors: latent attention, dense layers first, routed and shared experts."""

from collections.abc import Collection
from typing import Any

from converters.architectures.blocks import dense_mlp, latent_attention, mixture_of_experts
from converters.architectures.common import expert_dimensions, gpt_model
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.weight_map import Dimension, Parameter

_YARN_FIELDS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def has_experts(config: HuggingFaceConfig, layer: int) -> bool:
    """Whether `layer`, which may be a later one of multi-token prediction, is a mixture of experts by its number.

    `moe_layer_freq` is a number, whose multiples are such layers, or a list with 1 or 0 per layer. Raises UserError for
    a number below 1 and a list of another length.
    """
    frequency, layers = config.get("moe_layer_freq", 1), config["num_hidden_layers"]
    if layer < config["first_k_dense_replace"]:
        return False
    if not isinstance(frequency, list):
        if frequency < 1:
            raise config.error(f"has moe_layer_freq = {frequency}; it must be at least 1")
        return layer % frequency == 0
    if len(frequency) != layers:
        raise config.error(f"has {len(frequency)} values in moe_layer_freq for {layers} layers (num_hidden_layers)")
    return bool(frequency[min(layer, layers - 1)])


def decoder_layers(
    config: HuggingFaceConfig, layers: range, moe_layers: Collection[int], *, expert_bias: bool
) -> tuple[Parameter, ...]:
    """Parameters of `layers`: mixtures of experts in `moe_layers`, dense MLPs in the others."""
    return (
        *latent_attention(layers, low_rank_query=config.get("q_lora_rank", None) is not None),
        *dense_mlp(set(layers) - set(moe_layers)),
        *mixture_of_experts(moe_layers, expert_bias=expert_bias, shared_experts=config.get("n_shared_experts", 0) > 0),
    )


def latent_attention_fields(config: HuggingFaceConfig) -> dict[str, Any]:
    """MLATransformerConfig fields of latent attention (arXiv 2405.04434) and its rotary embedding.

    The norms inside get the model's epsilon, as in vLLM; transformers always uses 1e-6. Raises UserError for biases,
    and for a rotary embedding that Megatron cannot compute.
    """
    config.require("attention_bias", (False,), False)
    config.require("mlp_bias", (False,), False)
    config.require("rope_interleave", (True,), True)
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


def gpt_model_arguments(config: HuggingFaceConfig) -> dict[str, Any]:
    """Arguments of GPTModel."""
    rotary = {"position_embedding_type": "rope", "rotary_base": config.rope["rope_theta"], "rotary_percent": 1.0}
    return gpt_model(config, rotary)


def dimensions(config: HuggingFaceConfig) -> dict[str, Dimension]:
    """The named lengths of all shapes."""
    heads, rope = config["num_attention_heads"], config["qk_rope_head_dim"]
    nope, value, latent = config["qk_nope_head_dim"], config["v_head_dim"], config["kv_lora_rank"]
    return {
        "vocabulary": Dimension("vocab_size", config["vocab_size"]),
        "hidden": Dimension("hidden_size", config["hidden_size"]),
        "query": Dimension("num_attention_heads", heads, nope + rope),
        "query_latent": Dimension("q_lora_rank", config.get("q_lora_rank", 0)),
        "key_value_latent": Dimension("kv_lora_rank", latent),
        "key_value_latent_and_rope": Dimension("kv_lora_rank", latent + rope),
        "key_value_up": Dimension("num_attention_heads", heads, nope + value),
        "value": Dimension("num_attention_heads", heads, value),
        "ffn": Dimension("intermediate_size", config["intermediate_size"]),
        **expert_dimensions(config),
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
