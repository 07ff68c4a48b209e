"""Attention of SGLang 0.5.23 that caps its scores, for models that do.

Its first choice is fa3 on Hopper, which caps. Elsewhere it is trtllm_mha, whose kernels are told of no cap, or
flashinfer, which compiles a cap in when it plans, and is told of it afterwards.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.formats.safetensors import CONFIG, read_json
from megarl.rollout.soft_cap import has_soft_cap, refuse_uncapped
from megatron_ext import device

_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_ON_HOPPER, _ELSEWHERE = "fa3", "triton"
_ON_CPU = "torch_native"
"""It caps by `cpu.soft_cap`."""


def with_capping_attention(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The `arguments` of a server, with which the attention of its model is computed as it is.

    Raises UserError for attention among them that leaves the model's cap out.
    """
    if not has_soft_cap(read_json(Path(arguments["model_path"]) / CONFIG)):
        return dict(arguments)
    capability = device.compute_capability()
    usual = _ON_CPU if capability is None else _ON_HOPPER if capability[0] == 9 else _ELSEWHERE
    capping = (_ON_CPU,) if capability is None else (_ON_HOPPER, _ELSEWHERE)
    refuse_uncapped({name: arguments.get(name) for name in _BACKENDS}, capping)
    # Layers of transformers hand no attention a cap.
    refuse_uncapped({"model_impl": arguments.get("model_impl")}, ("auto", "sglang"))
    return {**arguments, _BACKENDS[0]: arguments.get(_BACKENDS[0]) or usual}
