"""Soft-capped attention in SGLang on a CPU (0.5.23): `torch_native` uses torch's function, which has no cap."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

_ATTENTION = "sglang.srt.layers.attention.torch_native_backend"


def register_hooks() -> None:
    """Register the hook that caps scores."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method in ("forward_extend", "forward_decode"):
        HookRegistry.register(f"{_ATTENTION}.TorchNativeAttnBackend.{method}", cap_scores, HookType.AROUND)


def cap_scores(
    original: Callable[..., Any], backend: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, *rest: Any, **named: Any
) -> Any:
    """Apply the cap of a `layer` that has one."""
    if not layer.logit_cap:
        return original(backend, q, k, v, layer, *rest, **named)
    with patch(f"{_ATTENTION}.scaled_dot_product_attention", partial(capped_attention, layer.logit_cap)):
        return original(backend, q, k, v, layer, *rest, **named)


def capped_attention(
    cap: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None,
    enable_gqa: bool,
    scale: float,
    is_causal: bool,
) -> Tensor:
    """torch's `scaled_dot_product_attention`, with scores s replaced by cap * tanh(s / cap) before the mask."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], dim=-3) for each in (key, value))
    scores = cap * torch.tanh(query.float() @ key.float().mT * (scale / cap))
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return (scores.softmax(-1) @ value.float()).to(query.dtype)
