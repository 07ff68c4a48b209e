"""Engine arguments, by the names that verl and slime use for them."""

from collections.abc import Mapping

OF_VERL: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        name: name
        for name in (
            *("enable_chunked_prefill", "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization"),
            *("max_model_len", "max_num_batched_tokens", "max_num_seqs"),
        )
    },
    "sglang": {
        "enforce_eager": "disable_cuda_graph",
        "gpu_memory_utilization": "mem_fraction_static",
        "max_model_len": "context_length",
        "max_num_seqs": "max_running_requests",
    },
}
"""Engine -> key of verl below actor_rollout_ref.rollout -> argument of the engine."""

TENSOR_PARALLEL: Mapping[str, str] = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}
"""Engine -> its argument for the tensor-parallel size."""

EXPERT_PARALLEL: Mapping[str, tuple[str, bool]] = {
    "vllm": ("enable_expert_parallel", True),
    "sglang": ("ep_size", False),
}
"""Engine -> its argument for expert parallelism, and whether that is a switch."""

OF_SLIME = ("sglang", "sglang_")
"""The engine of slime, and its prefix of engine arguments."""
