"""Models with grouped-query attention as they were released: their whole config.json is read, nothing is left over."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from converters.architectures import read_architecture
from converters.layout import check_tiling
from converters.layouts.megatron import ParallelSizes, megatron_layout

DECODER = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
LLAMA = {
    **DECODER,
    "model_type": "llama",
    "attention_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA_3_2 = {**LLAMA, "tie_word_embeddings": True, "rope_scaling": {**LLAMA["rope_scaling"], "factor": 32.0}}
QWEN = {
    **DECODER,
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_mrope": False,
    "use_sliding_window": False,
}
MIXTRAL = {
    **DECODER,
    "model_type": "mixtral",
    "max_position_embeddings": 32768,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "vocab_size": 32000,
}
GLM = {
    **DECODER,
    "model_type": "glm4_moe",
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "topk_group": 1,
    "vocab_size": 151552,
}


def sizes(hidden: int, ffn: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }


# config.json, elements of the released safetensors, and a layout.
RELEASED: Mapping[str, tuple[dict[str, Any], int, dict[str, int]]] = {
    "Llama-3.1-8B": (LLAMA | sizes(4096, 14336, 32, 32), 8_030_261_248, {"tensor": 16}),
    "Llama-3.1-70B": (LLAMA | sizes(8192, 28672, 80, 64), 70_553_706_496, {"tensor": 16, "pipeline": 4}),
    "Llama-3.1-405B": (LLAMA | sizes(16384, 53248, 126, 128), 405_853_388_800, {"tensor": 16, "pipeline": 9}),
    "Llama-3.2-1B": (LLAMA_3_2 | sizes(2048, 8192, 16, 32, head_dim=64), 1_235_814_400, {"tensor": 4}),
    "Llama-3.2-3B": (LLAMA_3_2 | sizes(3072, 8192, 28, 24, head_dim=128), 3_212_749_824, {"tensor": 8}),
    "Qwen2.5-0.5B": (
        QWEN | sizes(896, 4864, 24, 14, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
        494_032_768,
        {"tensor": 2},
    ),
    "Qwen2.5-7B": (
        QWEN | sizes(3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064),
        7_615_616_512,
        {"tensor": 4},
    ),
    "Qwen2.5-72B": (
        QWEN | sizes(8192, 29568, 80, 64, num_key_value_heads=8, vocab_size=152064),
        72_706_203_648,
        {"tensor": 16},
    ),
    "Mixtral-8x7B": (MIXTRAL | sizes(4096, 14336, 32, 32), 46_702_792_704, {"tensor": 16, "expert": 8}),
    "Mixtral-8x22B": (MIXTRAL | sizes(6144, 16384, 56, 48), 140_620_634_112, {"tensor": 8, "expert": 8}),
    "GLM-4.5": (
        GLM
        | sizes(5120, 12288, 92, 96, moe_intermediate_size=1536, n_routed_experts=160)
        | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "use_qk_norm": True},
        358_337_791_296,
        {"tensor": 8, "expert": 32, "pipeline": 4},
    ),
    "GLM-4.5-Air": (
        GLM
        | sizes(4096, 10944, 46, 96, moe_intermediate_size=1408, n_routed_experts=128)
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False},
        110_468_824_832,
        {"tensor": 16, "expert": 16},
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_their_number_of_parameters(name: str) -> None:
    config, released, _ = RELEASED[name]
    architecture = read_architecture(config)
    shapes = architecture.hf_shapes
    copies = [shapes[architecture.hf_copies[copy]] for copy in architecture.exported_copies]
    assert sum(math.prod(shape) for shape in [*shapes.values(), *copies]) == released


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_can_be_laid_out(name: str) -> None:
    """Many of them with more tensor-parallel ranks than key-value heads."""
    config, _, parallel = RELEASED[name]
    tensor, pipeline, expert = (parallel.get(kind, 1) for kind in ("tensor", "pipeline", "expert"))
    layout = megatron_layout(
        read_architecture(config),
        ParallelSizes(
            world_size=math.lcm(tensor, expert) * pipeline,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=1 if expert > 1 else None,
        ),
        module_names="te",
    )
    for rank in (0, layout.ranks - 1):
        check_tiling(layout.shard(rank))
