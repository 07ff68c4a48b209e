"""Attention under context parallelism in plain torch: for local modules, on a CPU and on GPUs.

Every rank has the queries of its own two chunks of each sequence, and gets the keys and values of all ranks. A
chunk looks at all chunks before it, and causally at itself.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_ext.attention.attention import (
    as_wide_as,
    attend_step_by_step,
    batches_of_similar_length,
    by_head,
    padded_index,
)
from megatron_ext.attention.context_parallel import rank_order
from megatron_ext.attention.varlen_kernels import cpu_flash_backward, cpu_flash_forward, merge


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    group: dist.ProcessGroup,
    *,
    softmax_scale: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal self-attention of the tokens of this rank of `group`, which `context_parallel.cut` chose.

    Shapes are those of `packed_causal_attention`, with the L tokens of this rank in place of T; `cu_seqlens` are
    the bounds of whole sequences. Memory is linear in their length; it is quadratic with `dropout`, `softcap` or
    `window`, and on other devices than a CPU.
    """
    order = rank_order(cu_seqlens.long(), group.size())
    of_all = torch.cat([key, value], dim=-1)
    of_all = gather_from_sequence_parallel_region(of_all, tensor_parallel_output_grad=True, group=group)
    keys, values = of_all.index_select(0, order).split([key.shape[-1], value.shape[-1]], dim=-1)
    is_plain = softcap is None and window is None and dropout == 0 and query.device.type == "cpu"
    outputs, places = [], []
    for chunks in _chunks_of_similar_length(cu_seqlens.tolist(), group.size(), group.rank(), query.device):
        own = _at(chunks.queries, query), _at(chunks.keys, keys), _at(chunks.keys, values)
        before = _at(chunks.before, keys), _at(chunks.before, values)
        if is_plain:
            output = _attend(*own, *before, chunks.is_before, softmax_scale)
        else:
            output = attend_step_by_step(
                own[0],
                torch.cat([before[0], own[1]], dim=1),
                torch.cat([before[1], own[2]], dim=1),
                chunks.hidden(window),
                softmax_scale=softmax_scale,
                dropout=dropout,
                softcap=softcap,
            )
        outputs.append(output[chunks.is_real])
        places.append(chunks.queries[chunks.is_real])
    return torch.cat(outputs)[torch.cat(places).argsort()]


class _Chunks(NamedTuple):
    """One chunk of each of N sequences, padded to the longest: H tokens, after B others of its sequence."""

    queries: Tensor
    """long[N, H]: places among the tokens of this rank."""
    keys: Tensor
    """long[N, H]: places of the same tokens among those of all ranks, sequence after sequence."""
    is_real: Tensor
    """bool[N, H]"""
    before: Tensor
    """long[N, B]: places of the tokens before them."""
    is_before: Tensor
    """bool[N, B]"""

    def hidden(self, window: int | None) -> Tensor:
        """bool[N, 1, H, B + H]: the keys, those before and then its own, that a query does not look at."""
        device = self.keys.device
        of_query = self.is_before.sum(1, keepdim=True) + torch.arange(self.keys.shape[1], device=device)
        of_key = torch.cat([torch.arange(self.before.shape[1], device=device).expand_as(self.before), of_query], 1)
        distance = of_query[:, :, None] - of_key[:, None, :]
        is_padding = torch.cat([~self.is_before, torch.zeros_like(self.is_real)], 1)
        hidden = (distance < 0) | is_padding[:, None, :]
        return (hidden if window is None else hidden | (distance >= window))[:, None]


def _at(places: Tensor, values: Tensor) -> Tensor:
    """Values [T, ...] at `places` [N, H]: [N, H, ...]."""
    return values[places.flatten()].unflatten(0, places.shape)


def _chunks_of_similar_length(bounds: list[int], ranks: int, rank: int, device: torch.device) -> Iterator[_Chunks]:
    """The two chunks of each sequence that this rank has."""
    for starts, lengths in batches_of_similar_length(bounds):
        halves = [length // (2 * ranks) for length in lengths]
        for is_late, number in enumerate((rank, 2 * ranks - 1 - rank)):
            own = [start // ranks + is_late * half for start, half in zip(starts, halves, strict=True)]
            counts = [number * half for half in halves]
            firsts = [start + count for start, count in zip(starts, counts, strict=True)]
            queries, is_real = padded_index(own, halves, device)
            keys, _ = padded_index(firsts, halves, device)
            yield _Chunks(queries, keys, is_real, *padded_index(starts, counts, device))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_before: Tensor,
    value_before: Tensor,
    is_before: Tensor,
    softmax_scale: float,
) -> Tensor:
    width = value.shape[-1]
    query, key, value = by_head(query, key, as_wide_as(key, value))
    if not key_before.shape[1]:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=softmax_scale)
    else:
        _, key_before, value_before = by_head(query.transpose(1, 2), key_before, as_wide_as(key_before, value_before))
        mask = torch.zeros_like(is_before, dtype=query.dtype).masked_fill_(~is_before, float("-inf"))
        output = _OwnAndEarlier.apply(query, key, value, key_before, value_before, mask, softmax_scale)
    return output[..., :width].transpose(1, 2)


class _OwnAndEarlier(torch.autograd.Function):
    """Attention causally to a chunk's own keys, and to earlier ones, of which some are padding, in one softmax."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, key_before, value_before, mask, scale = inputs
        mask = mask[:, None, None].expand(-1, 1, query.shape[2], -1)
        own, total = cpu_flash_forward(query, key, value, 0.0, True, scale=scale)
        before = cpu_flash_forward(query, key_before, value_before, 0.0, False, attn_mask=mask, scale=scale)
        output = own.to(total.dtype)
        merge(output, total, *before)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, key_before, value_before, mask, output, total)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, key_before, value_before, mask, output, total = ctx.saved_tensors
        merged = (output, total, 0.0)
        of_query, of_key, of_value = cpu_flash_backward(gradient, query, key, value, *merged, True, scale=ctx.scale)
        more, of_key_before, of_value_before = cpu_flash_backward(
            gradient, query, key_before, value_before, *merged, False, attn_mask=mask, scale=ctx.scale
        )
        return of_query + more, of_key, of_value, of_key_before, of_value_before, None, None
