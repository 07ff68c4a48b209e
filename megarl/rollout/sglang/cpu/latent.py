"""Latent attention in SGLang on a CPU (0.5.23): its own layers over the cache that `torch_native` reads.

SGLang applies adapters of kv_b_proj only in Triton. Their matrices have a slot per adapter: A [slots, r, L] and B
[slots, heads * (K + V), r], in which a head's key rows precede its value rows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from converters.number_formats import FP8_BLOCK, INT8_CHANNEL

_LATENT = "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry"
_LOADER = "sglang.srt.models.deepseek_common.deepseek_weight_loader.DeepseekV2WeightLoaderMixin"
_ROTATION = "sglang.srt.layers.rotary_embedding.factory"
_OF_SLOTS = "sglang.kernels.ops.lora.dense.kv_b_lora_absorbed"


def register_hooks() -> None:
    """Register the hooks of latent attention."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_LATENT}.get_handler", attend_to_latent, HookType.AROUND)
    HookRegistry.register(f"{_ROTATION}.get_rope_cpu", rotate_without_yarn, HookType.AROUND)
    HookRegistry.register(f"{_LOADER}.post_load_weights", decode_keys_and_values_of_heads, HookType.AFTER)
    for function, stand_in in (
        ("step_a_q_fwd", keys_of_heads),
        ("step_b_q_fwd", add_to_latent),
        ("step_a_v_fwd", low_rank_of_latent),
        ("step_b_v_fwd", add_values_of_heads),
    ):
        HookRegistry.register(f"{_OF_SLOTS}.{function}", stand_in, HookType.REPLACE)


def attend_to_latent(original: Callable[..., Any], registry: Any, backend: str) -> Any:
    """Make latent attention read latent keys and values from the cache for prompts, too, as it does for responses.

    For a prompt, SGLang passes `torch_native` per-head keys and values, which the backend looks up in the cache, where
    there are none.
    """
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    if backend != "torch_native":
        return original(registry, backend)
    return lambda *_: AttnForwardMethod.MLA


def rotate_without_yarn(
    original: Callable[..., Any],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    device: str | None = None,
) -> Any:
    """Rotate unscaled positions as on other devices: on a CPU SGLang asserts YaRN scaling."""
    rotation = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
    if rope_scaling is not None:
        return original(*rotation, device)
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return get_rope(*rotation)


_FORMATS = {each.codes: each for each in (FP8_BLOCK, INT8_CHANNEL)}
"""Dtype of codes -> number format."""


def decode_keys_and_values_of_heads(
    _result: None, model: Any, *_: Any, weight_names: Sequence[str] | None = None, **__: Any
) -> None:
    """Dequantise the matrices that latent attention derives from kv_b_proj to the model's dtype.

    On a CPU, SGLang requantises those in block FP8 with a single scale. On any device it dequantises those in INT8 in
    bfloat16, with rounded scales. `weight_names` are the weights that were loaded.
    """
    loaded = None if weight_names is None else {name.rpartition(".kv_b_proj.")[0] for name in weight_names}
    for i, layer in enumerate(model.model.layers):
        attention: Any = getattr(layer, "self_attn", None)
        projection = getattr(attention, "kv_b_proj", None)
        if projection is None or (number_format := _FORMATS.get(projection.weight.dtype)) is None:
            continue
        if loaded is not None and f"model.layers.{i}.self_attn" not in loaded:
            continue
        dtype = attention.kv_a_layernorm.weight.dtype
        scales = getattr(projection, number_format.scales_name("weight"))
        heads = number_format.dequantise(projection.weight.data, scales.data, dtype).unflatten(
            0, (-1, attention.qk_nope_head_dim + attention.v_head_dim)
        )
        keys, values = heads.split([attention.qk_nope_head_dim, attention.v_head_dim], dim=1)
        attention.w_kc, attention.w_vc = keys.contiguous(), values.contiguous().transpose(1, 2)


def keys_of_heads(queries: Tensor, b: Tensor, batch: Any, rows_of_head: int) -> Tensor:
    """Multiply queries [T, heads, K] by the key rows of B; returns [T, heads, r]."""
    found = queries.new_zeros(*queries.shape[:2], b.shape[-1])
    for rows, slot in _segments(batch):
        keys = b[slot].unflatten(0, (-1, rows_of_head))[:, : queries.shape[-1]]
        found[rows] = torch.einsum("thk,hkr->thr", queries[rows], keys)
    return found


def add_to_latent(low_rank: Tensor, a: Tensor, batch: Any, output: Tensor) -> Tensor:
    """Add `low_rank` [T, heads, r] times A, scaled, to the latent queries [T, heads, L]."""
    for rows, slot in _segments(batch):
        output[rows] += batch.scalings[slot] * torch.einsum("thr,rl->thl", low_rank[rows], a[slot])
    return output


def low_rank_of_latent(attended: Tensor, a: Tensor, batch: Any) -> Tensor:
    """Multiply attended latents [T, heads, L] by A; returns [T, heads, r]."""
    found = attended.new_zeros(*attended.shape[:2], a.shape[1])
    for rows, slot in _segments(batch):
        found[rows] = torch.einsum("thl,rl->thr", attended[rows], a[slot])
    return found


def add_values_of_heads(low_rank: Tensor, b: Tensor, batch: Any, output: Tensor, keys: int, values: int) -> Tensor:
    """Add `low_rank` [T, heads, r] times the value rows of B, scaled, to the heads' outputs [T, heads, V]."""
    for rows, slot in _segments(batch):
        of_values = b[slot].unflatten(0, (-1, keys + values))[:, keys:]
        output[rows] += batch.scalings[slot] * torch.einsum("thr,hvr->thv", low_rank[rows], of_values)
    return output


def _segments(batch: Any) -> Iterator[tuple[slice, int]]:
    """Yield runs of consecutive tokens, with the slot of their adapter."""
    bounds, slots = batch.seg_indptr.tolist(), batch.weight_indices.tolist()
    for segment in range(batch.num_segments):
        yield slice(bounds[segment], bounds[segment + 1]), slots[segment]
