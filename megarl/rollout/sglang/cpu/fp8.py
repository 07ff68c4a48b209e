"""Block FP8 in SGLang on a CPU (0.5.23): its own layers and loaders, with another multiplication under them.

SGLang multiplies codes on CPUs with AMX only, by kernels of a package that is not there, and packs them for that. Here
codes and scales stay where the loaders put them, as on a GPU, and become numbers of the model's type for every
multiplication; activations are not quantised. It is slow and right, and the same on every CPU.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from converters.number_formats import FP8_BLOCK

_FP8 = "sglang.srt.layers.quantization.fp8"
_LATENT = "sglang.srt.models.deepseek_common.deepseek_weight_loader.DeepseekV2WeightLoaderMixin"


def register_hooks() -> None:
    """Tell SGLang's registry of hooks those that give its FP8 layers a multiplication on a CPU."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_FP8}.Fp8Config.get_supported_act_dtypes", with_float32, HookType.AFTER)
    for method, apply in (("Fp8LinearMethod", multiply), ("Fp8MoEMethod", multiply_by_experts)):
        HookRegistry.register(f"{_FP8}.{method}.process_weights_after_loading", keep_codes, HookType.REPLACE)
        HookRegistry.register(f"{_FP8}.{method}.apply", apply, HookType.REPLACE)
    HookRegistry.register(f"{_LATENT}.post_load_weights", decode_keys_and_values_of_heads, HookType.AFTER)


def with_float32(dtypes: list[torch.dtype], *_: Any) -> list[torch.dtype]:
    """Let a model in float32 have weights in block FP8.

    SGLang 0.5.23 has the list of its GPU kernels, bfloat16 and float16, for every device. In float32 an engine differs
    from the same codes in transformers by rounding alone, so that tests see everything else.
    """
    return [*dtypes, torch.float32]


def keep_codes(method: Any, _layer: Any) -> None:
    """Leave codes and scales as they were loaded, where SGLang asserts that the CPU has AMX, and packs them."""
    if not method.block_quant:
        raise NotImplementedError("FP8 that is not in blocks, on a CPU")


def multiply(_method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Decode a matrix and multiply by it: `Fp8LinearMethod.apply`."""
    return F.linear(x, FP8_BLOCK.dequantise(layer.weight.data, layer.weight_scale_inv.data, x.dtype), bias)


def multiply_by_experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Decode the matrices of each expert that has a token, for SGLang's own torch: `Fp8MoEMethod.apply`."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    decoded = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=_Decoded(layer.w13_weight.data, layer.w13_weight_scale_inv.data, x.dtype),
        w2_weight=_Decoded(layer.w2_weight.data, layer.w2_weight_scale_inv.data, x.dtype),
    )
    output = moe_forward_native(decoded, x, dispatch_output.topk_output, method.moe_runner_config)
    return StandardCombineInput(hidden_states=output)


def decode_keys_and_values_of_heads(
    _result: None, model: Any, *_: Any, weight_names: Sequence[str] | None = None, **__: Any
) -> None:
    """Decode the matrices that latent attention multiplies by, which SGLang makes of kv_b_proj, as it does on CUDA.

    On a CPU it quantises them again, with one scale for all of them. `weight_names` are those that were loaded.
    """
    loaded = None if weight_names is None else {name.rpartition(".kv_b_proj.")[0] for name in weight_names}
    for i, layer in enumerate(model.model.layers):
        attention: Any = getattr(layer, "self_attn", None)
        projection = getattr(attention, "kv_b_proj", None)
        if projection is None or projection.weight.dtype != torch.float8_e4m3fn:
            continue
        if loaded is not None and f"model.layers.{i}.self_attn" not in loaded:
            continue
        dtype = attention.kv_a_layernorm.weight.dtype
        heads = FP8_BLOCK.dequantise(projection.weight.data, projection.weight_scale_inv.data, dtype).unflatten(
            0, (-1, attention.qk_nope_head_dim + attention.v_head_dim)
        )
        keys, values = heads.split([attention.qk_nope_head_dim, attention.v_head_dim], dim=1)
        attention.w_kc, attention.w_vc = keys.contiguous(), values.contiguous().transpose(1, 2)


class _Decoded:
    """The matrices of experts [experts, rows, columns], each decoded when it is asked for."""

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self._codes, self._scales, self._dtype = codes, scales, dtype

    def __getitem__(self, expert: int) -> Tensor:
        return FP8_BLOCK.dequantise(self._codes[expert], self._scales[expert], self._dtype)
