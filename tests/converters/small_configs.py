"""Configurations of small models, and tensors in which every element has a value of its own."""

from collections.abc import Mapping
from typing import Any

import torch

COMMON = {
    "hidden_act": "silu",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 18,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    # The first three and GLM as they were released.
    "llama": {
        **COMMON,
        "model_type": "llama",
        "num_key_value_heads": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "qwen2": {
        **COMMON,
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "max_window_layers": 28,
        "use_sliding_window": False,
    },
    "mixtral": {
        **COMMON,
        "model_type": "mixtral",
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "glm4_moe": {
        **COMMON,
        "model_type": "glm4_moe",
        "num_key_value_heads": 2,
        "head_dim": 6,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "rope_scaling": None,
        "rope_theta": 1000000,
    },
    # As transformers 5 writes them.
    "qwen3": {
        **COMMON,
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3_moe": {
        **COMMON,
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    # As it was released.
    "deepseek_v3": {
        **COMMON,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 5,
        "kv_lora_rank": 7,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "moe_layer_freq": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}


def make_config(name: str, **fields: Any) -> dict[str, Any]:
    return {**CONFIGS[name], **fields}


def count_up(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Float32 tensors that together hold 1, 2, 3, ... in order."""
    tensors, first = {}, 1
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + size, dtype=torch.float32).view(shape)
        first += size
    assert first < 2**24, "float32 counts no further"
    return tensors
