"""Advises on settings that make a process fit on its GPU."""

from collections.abc import Collection, Mapping
from typing import Any

from megarl.rehearsal.need import Need


def advise(need: Need, roles: Collection[str], megatron: Mapping[str, Any]) -> str:
    """Return settings that shrink the largest part of `need`, among those compatible with `megatron`.

    Example: "lower the share of the GPU that rollout.engine_args gives an engine, or refit.bucket_bytes"
    """
    knobs = _ENGINE_KNOBS if need.role == "engine" else _ROWS_KNOBS if megatron.get("use_torch_fsdp2") else _KNOBS
    named = knobs.get(need.phase) or knobs.get(need.largest)
    return named or (_BESIDE if need.largest in roles else knobs["weights"])


_BESIDE = (
    "take models beside the policy out of the shared pool in cluster.pools, to GPUs of their own, or raise"
    " megatron.tensor_model_parallel_size"
)
_SHARE = "the share of the GPU that rollout.engine_args gives an engine"
_KNOBS = {
    "activations": (
        "lower loop.max_tokens_per_micro_batch, set megatron.recompute_granularity=full, or raise"
        " megatron.context_parallel_size or megatron.tensor_model_parallel_size"
    ),
    "optimizer": (
        "set megatron.optimizer_cpu_offload=true, raise cluster.trainer_ranks, or raise"
        " megatron.pipeline_model_parallel_size or megatron.expert_model_parallel_size"
    ),
    "engine": f"lower {_SHARE}",
    "staged values": "lower megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size",
    "weights": (
        "raise megatron.pipeline_model_parallel_size, megatron.tensor_model_parallel_size or"
        " megatron.expert_model_parallel_size"
    ),
}
"""Part of a need, or phase -> settings that shrink it."""

_ROWS_KNOBS = {
    **_KNOBS,
    **dict.fromkeys(("optimizer", "weights"), "raise cluster.trainer_ranks or megatron.tensor_model_parallel_size"),
}
"""The same for FSDP2, which has no pipeline stages and no optimizer on the host."""

_ENGINE_KNOBS = {
    "longest response": f"raise {_SHARE} or the ranks that an engine is cut over, or set rollout.weights=fp8_block",
    "rollout": f"lower {_SHARE}, or refit.bucket_bytes",
}
