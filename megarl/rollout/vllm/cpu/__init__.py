"""Corrections to vLLM that only a CPU needs, one module for each part of it. Nothing here runs on a GPU."""

from megarl.rollout.vllm.cpu import corrections, experts, fp8, kv_cache, number_formats, routed_experts

__all__ = ["corrections", "experts", "fp8", "kv_cache", "number_formats", "routed_experts"]
