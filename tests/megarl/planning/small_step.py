"""A step of a small model on sixteen GPUs."""

from dataclasses import replace
from typing import Any

from converters.architectures import read_architecture
from converters.cost.devices import DEVICES
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.planning.cluster import Cluster
from megarl.planning.refit import PlannedRefit, engine_sizes
from megarl.planning.step.prediction import PlannedStep
from megarl.planning.workload import Workload

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}


def small_step(*, colocated: bool = True, memory_gbyte: float = 80, **trainer: int) -> PlannedStep:
    """The step; `trainer` are fields of `ParallelSizes`."""
    architecture = read_architecture(CONFIG)
    sizes: dict[str, Any] = {"world_size": 16, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    refit = PlannedRefit(
        architecture=architecture,
        engine_architecture=architecture,
        trainer=ParallelSizes(**{**sizes, **trainer}),
        engine=engine_sizes(2, None),
        replicas=8,
        number_format=None,
        cluster=Cluster(),
        colocated=colocated,
        bucket_bytes=10**8,
    )
    device = replace(DEVICES["H100"], memory_bytes=memory_gbyte * 1e9)
    return PlannedStep(refit, Workload(samples=16, response_tokens=1000, max_response_tokens=4096), device)
