"""Chooses attention backends of vLLM 0.32.0 that soft-cap scores, for models that need it.

FLASHINFER does not pass the cap to the kernels that it chooses itself: TRTLLM on Blackwell, where it is vLLM's first
choice, and XQA for decoding on Hopper and Blackwell RTX GPUs. Nothing in vLLM rules it out. Elsewhere FLASH_ATTN is the
first choice; TRITON_ATTN works on every GPU.
"""

from collections.abc import Mapping
from typing import Any

from megarl.rollout.soft_cap import has_soft_cap, refuse_uncapped

_BACKEND = "attention_backend"
_CONFIG = "attention_config"
"""The other argument that may name a backend and, in the field below, backends for layers of one kind."""
_PER_KIND = "backend_per_kind"
_CAPPING = ("FLASH_ATTN", "TRITON_ATTN")
_BLACKWELL = (10, 0)


def capping_attention(hf_config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments to add to `given` so that attention applies the cap of the model with this config.json.

    Raises UserError if `given` chooses a backend that ignores the cap.
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
    # Queried through NVML, which does not initialise CUDA, since workers may be forked.
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return capability is not None and tuple(capability) >= _BLACKWELL
