"""The models of `refit.py`: two families with fewer layers and experts, but tensors of the original sizes."""

from collections.abc import Mapping
from typing import Any

from converters.layouts.parallel_sizes import ParallelSizes

TRAINERS: Mapping[str, ParallelSizes] = {
    "TP2 x EP2 x PP2": ParallelSizes(
        world_size=4,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    ),
    "one rank": ParallelSizes(world_size=1),
}
"""Trainers with unsplit experts."""
ENGINES: Mapping[str, ParallelSizes] = {
    f"TP{workers}": ParallelSizes(world_size=workers, tensor_model_parallel_size=workers) for workers in (2, 1, 3, 4)
}
"""Engines, which also split experts."""
TRAINER = "TP2 x EP2 x PP2"
ENGINE = "TP2"
DEFAULT_MODELS = ("qwen3_moe", "deepseek_v3")

_COMMON: Mapping[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_QWEN3_MOE: Mapping[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    # The widths of Qwen3-30B-A3B: 2 of its 48 layers, 16 of its 128 experts, a vocabulary of 4,096.
    "qwen3_moe": _QWEN3_MOE,
    # The same number of elements in 12 experts, whose 1,024 rows give each of four workers whole FP8 blocks.
    "qwen3_moe_wide": {**_QWEN3_MOE, "moe_intermediate_size": 1024, "num_experts": 12},
    # The first at half the hidden size, with 6 experts and a vocabulary of 2,048.
    "qwen3_moe_100mb": {
        **_QWEN3_MOE,
        "hidden_size": 1024,
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "vocab_size": 2048,
    },
    # The same in 4 experts of 1,024 rows.
    "qwen3_moe_wide_100mb": {
        **_QWEN3_MOE,
        "hidden_size": 1024,
        "moe_intermediate_size": 1024,
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "vocab_size": 2048,
    },
    # The first with heads and a vocabulary that are divisible by three workers.
    "qwen3_moe_thirds": {
        **_QWEN3_MOE,
        "num_attention_heads": 24,
        "num_key_value_heads": 6,
        "vocab_size": 4608,
    },
    # The widths of Moonlight-16B-A3B with DeepSeek-V3's latent queries: one dense layer and one of 8 experts.
    "deepseek_v3": {
        **_COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 4096,
        "max_position_embeddings": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "num_nextn_predict_layers": 0,
        "rope_theta": 50000.0,
        "rope_scaling": None,
    },
}
"""config.json of models of about 400 MB or 100 MB in bf16, without multi-token prediction."""
