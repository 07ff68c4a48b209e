"""FP8 KV cache scales that rule out overflow, derived from bounds that follow from the weights (vLLM 0.32).

The output rows of an RMSNorm over H channels have, before its gains g, a norm of at most sqrt(H). A channel of keys or
values, with weights w and bias b, is therefore at most sqrt(H) |g w| + |b|. A norm over a head's keys bounds them in
the same way, and rotary embeddings rotate pairs of a head's channels. The scales are powers of two, so dividing by them
is exact. Queries get scales, too, for kernels that want them in FP8.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention, MLAAttention

from converters.errors import UserError
from megarl.rollout.vllm.kind import FP8_KEYS_AND_VALUES

_LARGEST = 448.0
_READING_BUFFERS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Attention backends that read the scales in every step; FlashInfer's keeps those of its first step."""
_ROWS_AT_ONCE = 512


@torch.no_grad()
def bound_keys_and_values(model: nn.Module) -> None:
    """Set the scales of every layer with an FP8 KV cache to those derived from its weights.

    Raises UserError for layers without a known bound, and for attention backends that would not read new scales.
    """
    modules: list[Any] = list(model.modules())
    layers = {each.self_attn.attn: each for each in modules if _is_bounded(each)}
    for name, module in model.named_modules():
        if isinstance(module, Attention | MLAAttention) and module.kv_cache_dtype in FP8_KEYS_AND_VALUES:
            if module not in layers:
                raise UserError(
                    f"rollout.kv_scales=bound knows no bound of the keys and values of {name}: set it to unit"
                )
            _check_backend(module)
            _set_scales(module, name, _largest(layers[module]))


def _is_bounded(layer: Any) -> bool:
    attention = getattr(layer, "self_attn", None)
    parts = all(hasattr(attention, each) for each in ("attn", "qkv_proj", "q_size", "kv_size", "rotary_emb"))
    return parts and hasattr(layer, "input_layernorm")


def _check_backend(attention: Attention) -> None:
    backend = attention.attn_backend.get_name()
    if backend not in _READING_BUFFERS:
        raise UserError(
            f"rollout.kv_scales=bound changes scales with the weights, which {backend} does not follow: set"
            " rollout.engine_args.attention_backend to FLASH_ATTN or TRITON_ATTN, or kv_scales to unit"
        )


def _largest(layer: Any) -> dict[str, float]:
    """The bounds of the queries, keys and values of a decoder layer."""
    attention = layer.self_attn
    channels = _channels(layer.input_layernorm, attention.qkv_proj)
    states = dict(zip("qkv", channels.split([attention.q_size, attention.kv_size, attention.kv_size]), strict=True))
    largest = {name: float(each.max()) for name, each in states.items()}
    # Greater than 1 if YaRN scales attention.
    turned = math.sqrt(2) * float(attention.rotary_emb.cos_sin_cache.abs().max())
    for name in "qk":
        norm = getattr(attention, f"{name}_norm", None)
        largest[name] = turned * (largest[name] if norm is None else _largest_of_norm(norm))
    return largest


def _channels(norm: Any, projection: Any) -> Tensor:
    """The bounds of all output channels of `projection` applied to the output of `norm`, in any number format."""
    width = norm.weight.numel()
    squares: Tensor | float = 0.0
    for first in range(0, width, _ROWS_AT_ONCE):
        rows = _unit_rows(norm.weight, first, min(_ROWS_AT_ONCE, width - first))
        made = projection.quant_method.apply(projection, norm(rows), None)
        squares = squares + made.to(torch.float32).square().sum(0)
    assert isinstance(squares, Tensor)
    bias = 0.0 if projection.bias is None else projection.bias.to(torch.float32).abs()
    return squares.sqrt() + bias


def _largest_of_norm(norm: Any) -> float:
    width = norm.weight.numel()
    return float(norm(_unit_rows(norm.weight, 0, width)).abs().max())


def _unit_rows(like: Tensor, first: int, count: int) -> Tensor:
    """Rows with one nonzero channel each, from index `first`, of the same norm as a norm layer's output rows."""
    rows = like.new_zeros(count, like.numel())
    rows.diagonal(first).fill_(math.sqrt(like.numel()))
    return rows


def _set_scales(attention: Any, name: str, largest: dict[str, float]) -> None:
    for states, value in largest.items():
        if not math.isfinite(value):
            raise ValueError(f"the weights of {name} are no numbers to work with: its {states} could be {value}")
        scale = 2.0 ** math.ceil(math.log2(value / _LARGEST)) if value else 1.0
        getattr(attention, f"_{states}_scale").fill_(scale)
        setattr(attention, f"_{states}_scale_float", scale)
        if states != "q":
            getattr(attention, f"_{states}_scale_cpu").fill_(scale)
