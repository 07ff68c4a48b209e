"""Chooses attention backends of SGLang 0.5.23 that soft-cap scores, for models that need it.

SGLang's default on Hopper, fa3, applies the cap. Elsewhere it is trtllm_mha, whose kernels are not passed the cap, or
flashinfer, which compiles the cap in when it plans, but gets it only afterwards.
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
"""It applies the cap through `cpu.soft_cap`."""


def with_capping_attention(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The `arguments` of a server, with a backend that applies the model's cap.

    Raises UserError if they choose a backend that ignores it.
    """
    if not has_soft_cap(read_json(Path(arguments["model_path"]) / CONFIG)):
        return dict(arguments)
    capability = device.compute_capability()
    usual = _ON_CPU if capability is None else _ON_HOPPER if capability[0] == 9 else _ELSEWHERE
    capping = (_ON_CPU,) if capability is None else (_ON_HOPPER, _ELSEWHERE)
    refuse_uncapped({name: arguments.get(name) for name in _BACKENDS}, capping)
    # The layers of transformers do not pass on the cap.
    refuse_uncapped({"model_impl": arguments.get("model_impl")}, ("auto", "sglang"))
    return {**arguments, _BACKENDS[0]: arguments.get(_BACKENDS[0]) or usual}
