"""Megatron's configuration of what many architectures share."""

from collections.abc import Sequence
from typing import Any

from converters.architectures.hf_config import HuggingFaceConfig


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


def expert_routing(config: HuggingFaceConfig) -> dict[str, Any]:
    """TransformerConfig fields of a mixture of experts that drops no token and has no balancing loss."""
    if config["num_experts_per_tok"] < 2:
        raise config.error("has num_experts_per_tok = 1; Megatron does not normalise the weight of a single expert")
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }


def layer_pattern(moe_layers: Sequence[int], num_layers: int) -> int | list[int]:
    """`moe_layer_freq`: 1 where every layer is a mixture of experts, else 1 or 0 for each layer.

    Megatron's distributed checkpoints name the parameters of uniform layers differently, hence the 1.
    """
    pattern = [int(layer in moe_layers) for layer in range(num_layers)]
    return pattern if 0 in pattern else 1
