"""Reference core attention over packed sequences, in plain torch: for CPU, and for GPUs without Transformer Engine."""

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

# From this length on, giving the values the width of the keys costs less than the torch kernel without tiles, whose
# memory is quadratic in the length.
_TILED_FROM = 128


class PackedAttention(MegatronModule):
    """Causal attention within each of the sequences that lie end to end in a micro-batch (THD).

    Takes the place of megatron-core's DotProductAttention, which refuses packed sequences and keys and values of
    different width (multi-latent attention).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        softcap: float | None = None,
        **_options: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise NotImplementedError(f"{attention_type} attention with a {attn_mask_type.name} mask")
        self.layer_number = layer_number
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.softcap = softcap
        self.window = _window(config, layer_number)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002
        attn_mask_type: AttnMaskType | None = None,  # noqa: ARG002
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend; `query` [T, heads, k_width], `key` [T, groups, k_width], `value` [T, groups, v_width].

        Returns [T, heads * v_width]. `attention_mask` and `attn_mask_type` are Megatron's and not read: the mask
        follows from `packed_seq_params`.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd" or attention_bias is not None:
            raise NotImplementedError("PackedAttention computes packed (thd) sequences without a bias")
        return packed_causal_attention(
            query,
            key,
            value,
            packed_seq_params.cu_seqlens_q,
            softmax_scale=self.softmax_scale,
            dropout=self.dropout if self.training else 0.0,
            softcap=self.softcap,
            window=self.window,
        ).flatten(1)


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """Over how many tokens, itself included, a token of the layer looks back; None over all."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    before = config.window_size[0]
    return None if before < 0 else before + 1


def packed_causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    softmax_scale: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal self-attention of sequences lying end to end.

    `query` [T, heads, k_width]; `key` [T, groups, k_width] and `value` [T, groups, v_width] with heads a multiple of
    groups; `cu_seqlens` [N + 1] are the sequences' bounds in T, the last of which is T. Returns [T, heads, v_width].
    With `softcap`, scores become `softcap * tanh(scores / softcap)`; with `window`, a token looks at itself and the
    `window - 1` tokens before it.

    Sequences of similar length are computed together, so the time does not grow with their number; memory is linear in
    the length of long ones, quadratic with `softcap` or `window`.
    """
    plain = softcap is None and window is None
    attend = _attend if plain else partial(_attend_step_by_step, softcap=softcap, window=window)
    bounds = cu_seqlens.tolist()
    if bounds[-1] != len(query):
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}, but there are {len(query)} tokens")
    outputs, positions = [], []
    for starts, lengths in _batches_of_similar_length(bounds):
        index, is_real = _padded_index(starts, lengths, query.device)
        batch = (tensor[index.flatten()].unflatten(0, index.shape) for tensor in (query, key, value))
        output = attend(*batch, softmax_scale=softmax_scale, dropout=dropout)
        outputs.append(output[is_real])
        positions.append(index[is_real])
    order = torch.cat(positions).argsort()
    return torch.cat(outputs)[order]


def _batches_of_similar_length(bounds: list[int]) -> list[tuple[list[int], list[int]]]:
    """Starts and lengths of the sequences, in batches where padding to the longest adds at most a quarter or 7."""
    batches: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for start, stop in pairwise(bounds):
        length = stop - start
        if length == 0:
            continue
        step = max(8, (1 << length.bit_length()) >> 3)
        starts, lengths = batches[-(-length // step) * step]
        starts.append(start)
        lengths.append(length)
    return list(batches.values())


def _padded_index(starts: list[int], lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions [N, longest] of the tokens of each sequence, and which of them are real: the rest repeat the last."""
    length = torch.tensor(lengths, device=device)[:, None]
    offset = torch.arange(max(lengths), device=device)[None, :]
    index = torch.tensor(starts, device=device)[:, None] + torch.minimum(offset, length - 1)
    return index, offset < length


def _attend(query: Tensor, key: Tensor, value: Tensor, *, softmax_scale: float, dropout: float) -> Tensor:
    # Padding comes after all tokens of a sequence, where the causal mask hides it.
    query, key, value = _by_head(query, key, value)
    width = value.shape[-1]
    if query.shape[2] >= _TILED_FROM:
        value = F.pad(value, (0, key.shape[-1] - width))
    output = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=softmax_scale)
    return output[..., :width].transpose(1, 2)


def _attend_step_by_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float,
    dropout: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """Attention with soft-capped scores or a window, which torch's kernels lack; like them in float32 or better."""
    dtype = query.dtype
    query, key, value = (tensor.to(torch.promote_types(dtype, torch.float32)) for tensor in _by_head(query, key, value))
    scores = query @ key.mT * softmax_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(scores.shape[-1], device=scores.device)
    distance = position[:, None] - position[None, :]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    weights = F.dropout(scores.masked_fill(hidden, -math.inf).softmax(-1), dropout)
    return (weights @ value).transpose(1, 2).to(dtype)


def _by_head(query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
    """Each as [N, heads, T, width], keys and values repeated for the heads that share them."""
    heads_per_group = query.shape[2] // key.shape[2]
    for tensor, repeats in ((query, 1), (key, heads_per_group), (value, heads_per_group)):
        by_head = tensor.transpose(1, 2)
        yield by_head.repeat_interleave(repeats, dim=1) if repeats > 1 else by_head
