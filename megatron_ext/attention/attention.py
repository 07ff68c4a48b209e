"""Causal attention over concatenated sequences, in plain torch."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.attention.whole_scores import attend_by_whole_scores

# From this length on, padding the values to the width of the keys is cheaper than torch's untiled kernel, whose memory
# is quadratic in the length.
_TILED_FROM = 128
# Up to this length, on a CPU, multiplying whole score matrices is faster than torch's tiled kernel, which computes only
# their lower half.
WHOLE_SCORES_UP_TO = 512
# From this length on, on a CPU, computing a sequence alone is faster than padding it and copying it to a batch and
# back.
ALONE_FROM = 64


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
    """Causal self-attention of concatenated sequences.

    `query` [T, heads, k_width]; `key` [T, groups, k_width] and `value` [T, groups, v_width] with heads a multiple of
    groups; `cu_seqlens` [N + 1] are the sequences' bounds in T, the last of which is T. Returns [T, heads, v_width].
    With `softcap`, scores become `softcap * tanh(scores / softcap)`; with `window`, a token looks at itself and the
    `window - 1` tokens before it.

    Sequences of similar length are computed together, so the time does not grow with their number; on a CPU, long ones
    are computed one by one. Memory is linear in the length of long ones, quadratic with `softcap` or `window`. Raises
    ValueError if the bounds do not end at T.
    """
    plain = softcap is None and window is None
    kernel = _attend if plain else partial(_attend_causally, softcap=softcap, window=window)
    attend = partial(kernel, softmax_scale=softmax_scale, dropout=dropout)
    bounds = cu_seqlens.tolist()
    if bounds[-1] != len(query):
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}, but there are {len(query)} tokens")
    alone_from = ALONE_FROM if query.device.type == "cpu" else math.inf
    batches = batches_of_similar_length(bounds)
    alone = sorted(start for starts, lengths in batches if min(lengths) >= alone_from for start in starts)
    outputs = _attend_alone(query, key, value, bounds, alone, attend)
    together = [(starts, lengths) for starts, lengths in batches if min(lengths) < alone_from]
    if not together:
        return torch.cat(outputs)
    positions = [torch.arange(start, start + len(output)) for start, output in zip(alone, outputs, strict=True)]
    for starts, lengths in together:
        index, is_real = padded_index(starts, lengths, query.device)
        batch = (tensor[index.flatten()].unflatten(0, index.shape) for tensor in (query, key, value))
        outputs.append(attend(*batch)[is_real])
        positions.append(index[is_real])
    order = torch.cat(positions).argsort()
    return torch.cat(outputs)[order]


def _attend_alone(
    query: Tensor, key: Tensor, value: Tensor, bounds: list[int], starts: list[int], attend: Callable[..., Tensor]
) -> list[Tensor]:
    """The outputs of the sequences that begin at `starts`, computed one by one without copies."""
    if not starts:
        return []
    lengths = [stop - start for start, stop in pairwise(bounds)]
    # Split in one operation, so that backward concatenates all gradients in one, too.
    sequences = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
    by_start = {start: sequence for start, sequence in zip(bounds, sequences, strict=False) if len(sequence[0])}
    return [attend(*(tensor[None] for tensor in by_start[start]))[0] for start in starts]


def batches_of_similar_length(bounds: list[int]) -> list[tuple[list[int], list[int]]]:
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


def padded_index(starts: list[int], lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions [N, longest] of the tokens of each sequence, and which of them are real: the rest repeat the last."""
    length = torch.tensor(lengths, device=device)[:, None]
    offset = torch.arange(max(lengths), device=device)[None, :]
    index = torch.tensor(starts, device=device)[:, None] + torch.minimum(offset, length - 1)
    return index, offset < length


def _attend(query: Tensor, key: Tensor, value: Tensor, *, softmax_scale: float, dropout: float) -> Tensor:
    # Padding is at the end of each sequence, where the causal mask hides it.
    if query.device.type == "cpu" and query.shape[1] <= WHOLE_SCORES_UP_TO and not dropout:
        return attend_by_whole_scores(query, key, value, softmax_scale)
    query, key, value = by_head(query, key, value)
    width = value.shape[-1]
    if query.shape[2] >= _TILED_FROM:
        value = as_wide_as(key, value)
    output = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=softmax_scale)
    return output[..., :width].transpose(1, 2)


def _attend_causally(query: Tensor, key: Tensor, value: Tensor, *, window: int | None, **options: Any) -> Tensor:
    position = torch.arange(query.shape[1], device=query.device)
    distance = position[:, None] - position[None, :]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return attend_step_by_step(query, key, value, hidden, **options)


def attend_step_by_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    *,
    softmax_scale: float,
    dropout: float,
    softcap: float | None,
) -> Tensor:
    """Attention with soft-capped scores or a window, which torch's kernels lack; like them in float32 or better.

    Shapes are `query` [N, H, heads, width], `key` and `value` [N, K, groups, width], and `hidden` bool[N, 1, H, K] or
    [H, K], True where a query does not look at a key.
    """
    dtype = query.dtype
    query, key, value = (tensor.to(torch.promote_types(dtype, torch.float32)) for tensor in by_head(query, key, value))
    scores = query @ key.mT * softmax_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = F.dropout(scores.masked_fill(hidden, -math.inf).softmax(-1), dropout)
    return (weights @ value).transpose(1, 2).to(dtype)


def as_wide_as(key: Tensor, value: Tensor) -> Tensor:
    """Values [..., width] padded with zeros to the width of the keys, as kernels require."""
    missing = key.shape[-1] - value.shape[-1]
    # A pad of 0 would copy them, too.
    return F.pad(value, (0, missing)) if missing else value


def by_head(query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
    """Query, key and value, each as [N, heads, T, width], keys and values repeated for the heads that share them."""
    heads_per_group = query.shape[2] // key.shape[2]
    for tensor, repeats in ((query, 1), (key, heads_per_group), (value, heads_per_group)):
        by_head = tensor.transpose(1, 2)
        yield by_head.repeat_interleave(repeats, dim=1) if repeats > 1 else by_head
