"""Attention of vLLM 0.32.0 that caps its scores, for models that do.

FLASHINFER hands no cap to the kernels that it takes by itself: those of TRTLLM on Blackwell, where it is vLLM's first
choice, and for responses that of XQA on Hopper and RTX GPUs of Blackwell. Nothing in vLLM rules it out. FLASH_ATTN is
first elsewhere; TRITON_ATTN works on every GPU.
"""

from collections.abc import Mapping
from typing import Any

from megarl.rollout.soft_cap import has_soft_cap, refuse_uncapped

_BACKEND = "attention_backend"
_CONFIG = "attention_config"
"""The other place where a backend may be named, and, in the field below, those for layers of one kind."""
_PER_KIND = "backend_per_kind"
_CAPPING = ("FLASH_ATTN", "TRITON_ATTN")
_BLACKWELL = (10, 0)


def capping_attention(hf_config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments beside `given` with which the attention of the model with this config.json is computed as it is.

    Raises UserError for a backend among `given` that leaves the cap out.
    """
    if not has_soft_cap(hf_config):
        return {}
    config = given.get(_CONFIG) or {}
    chosen = {_BACKEND: given.get(_BACKEND), f"{_CONFIG}.backend": config.get("backend")}
    per_kind = {f"{_CONFIG}.{_PER_KIND}.{kind}": each for kind, each in (config.get(_PER_KIND) or {}).items()}
    refuse_uncapped({name: _as_vllm_reads(each) for name, each in {**chosen, **per_kind}.items()}, _CAPPING)
    is_chosen = any(_as_vllm_reads(each) for each in chosen.values())
    return {} if is_chosen or not _is_blackwell() else {_BACKEND: "TRITON_ATTN"}


def _as_vllm_reads(backend: str | None) -> str | None:
    return None if backend is None or backend.lower() == "auto" else backend.upper()


def _is_blackwell() -> bool:
    # Asked of NVML, which leaves CUDA as it is: workers may be forked.
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return capability is not None and tuple(capability) >= _BLACKWELL
