"""Megatron's fields that define a model: they follow from its config.json, and cannot be chosen separately."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from converters.errors import UserError

if TYPE_CHECKING:
    from converters.architectures import Architecture

MODEL_FIELDS: Mapping[str, Any] = {
    "activation_func_clamp_value": None,
    "add_qkv_bias": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "glu_linear_offset": 0.0,
    "heterogeneous_block_specs": False,
    "is_hybrid_model": False,
    "layernorm_zero_centered_gamma": False,
    "linear_attention_freq": None,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "moe_layer_freq": 1,
    "moe_router_enable_expert_bias": False,
    "moe_router_group_topk": None,
    "moe_router_num_groups": None,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_topk_limited_devices": None,
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_gate": False,
    "moe_shared_expert_intermediate_size": None,
    "mrope_section": None,
    "multi_latent_attention": False,
    "no_rope_freq": None,
    "num_moe_experts": None,
    "qk_l2_norm": False,
    "qk_layernorm": False,
    "rotary_interleaved": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "window_attn_skip_freq": None,
    "window_size": None,
}
"""Field that defines the model -> Megatron's default, for an `Architecture.transformer_config` that does not set it."""

LATENT_ATTENTION_FIELDS = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
"""Fields of MLATransformerConfig that define a model; models without latent attention do not have them."""

MODEL_CHOICES = (
    "moe_token_dispatcher_type",
    "moe_router_load_balancing_type",
    "moe_router_bias_update_rate",
)
"""Fields that an architecture sets, but that may be chosen, since they only concern how it is computed and trained."""


def without_model_fields(architecture: "Architecture", options: Mapping[str, Any]) -> dict[str, Any]:
    """The `options` that the architecture does not already determine.

    Raises UserError for an option that would make the trainer's model differ from config.json, and so from the
    engines', and for one that does not work with this model.
    """
    exchange = options.get("cp_comm_type")
    if architecture.multi_latent_attention and "a2a" in (exchange if isinstance(exchange, list) else [exchange]):
        raise UserError(
            f"megatron.cp_comm_type={exchange} is not supported for a {architecture.model_type} model: Transformer"
            " Engine exchanges by heads only values that are as wide as the keys; use p2p"
        )
    said = {**MODEL_FIELDS, **dict.fromkeys(LATENT_ATTENTION_FIELDS), **architecture.gpt_model}
    said |= architecture.transformer_config
    others = {}
    for name, value in options.items():
        if name in MODEL_CHOICES or name not in said:
            others[name] = value
        elif _plain(value) != _plain(said[name]):
            raise UserError(
                f"megatron.{name}={value} is not what config.json of this {architecture.model_type} model says, which"
                f" is {said[name]}: the engines follow config.json, and the trainer must be the same model; leave it"
                " out, or change config.json"
            )
    return others


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
