"""Corrections to SGLang that only a CPU needs, one module for each part of it. Nothing here runs on a GPU."""

from megarl.rollout.sglang.cpu import corrections, experts, fp8, int8, kv_cache, latent, soft_cap

__all__ = ["corrections", "experts", "fp8", "int8", "kv_cache", "latent", "soft_cap"]
