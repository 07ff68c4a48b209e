"""Kernels for attention over sequences of different lengths, which return the log-sum-exps needed to merge parts."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_ext.attention import whole_scores
from megatron_ext.attention.attention import (
    ALONE_FROM,
    WHOLE_SCORES_UP_TO,
    batches_of_similar_length,
    by_head,
    padded_index,
)
from megatron_ext.attention.whole_scores import Scores

_WIDEST_HEAD, _HEAD_STEP = 256, 8
"""Limits of the fused kernel for CUDA."""


class VarlenSequences(NamedTuple):
    """Concatenated queries and keys of N pairs of sequences: each query attends to its pair's keys.

    If `is_causal`, both are of the same tokens, and attention is causal.
    """

    queries: tuple[int, ...]
    """Lengths."""
    keys: tuple[int, ...]
    """Lengths."""
    is_causal: bool
    scale: float


class Merged(NamedTuple):
    """The merged attention of queries to all their keys."""

    gradient: Tensor
    """With respect to the output."""
    output: Tensor
    total: Tensor
    """Log-sum-exps."""


class Kernel(Protocol):
    """Queries are [Q, heads, width], keys and values [K, groups, width]."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sequences: VarlenSequences) -> tuple[Tensor, Tensor]:
        """Output, and float32[Q, heads], the log-sum-exp of each query's scores."""
        ...

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, merged: Merged, sequences: VarlenSequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; these keys' part of them if `merged` covers more keys."""
        ...


def merge(output: Tensor, total: Tensor, of_others: Tensor, total_of_others: Tensor) -> None:
    """Merge, in place, the attention `output` [..., width] of queries with that to other keys: one softmax over all.

    Each has the log-sum-exps [...] of its scores; `total` is updated to that of all keys. Backward each part gets the
    merged values, from which it computes its part of the gradient.
    """
    merged = torch.logaddexp(total, total_of_others)
    output.mul_((total - merged).exp_()[..., None])
    output.addcmul_(of_others, (total_of_others - merged).exp_()[..., None])
    total.copy_(merged)


def kernel_for(query: Tensor) -> Kernel | None:
    """The kernel for queries of this device, dtype and width, if there is one."""
    if query.device.type == "cpu":
        return CpuKernel()
    width = query.shape[-1]
    is_fused = query.dtype in (torch.bfloat16, torch.float16) and width <= _WIDEST_HEAD and width % _HEAD_STEP == 0
    return CudaKernel() if query.device.type == "cuda" and is_fused else None


class CudaKernel:
    """torch's flash attention: one call for all sequences."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sequences: VarlenSequences) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        sizes = _sizes(sequences, query.device)
        options = 0.0, sequences.is_causal, False
        output, total, *_ = _flash_forward(query, key, value, *sizes, *options, scale=sequences.scale)
        return output, total.t()

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, merged: Merged, sequences: VarlenSequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        # The kernel expects contiguous log-sum-exps, and random numbers, which are unused without dropout.
        total, unused = merged.total.t().contiguous(), torch.zeros(2, dtype=torch.uint64, device=query.device)
        return _flash_backward(
            merged.gradient.contiguous(),
            query,
            key,
            value,
            merged.output,
            total,
            *_sizes(sequences, query.device),
            0.0,
            sequences.is_causal,
            unused,
            unused,
            scale=sequences.scale,
        )


def _sizes(sequences: VarlenSequences, on: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Bounds and longest sequence, of queries and keys."""
    return (
        _bounds(sequences.queries, on),
        _bounds(sequences.keys, on),
        max(sequences.queries),
        max(sequences.keys),
    )


@lru_cache(maxsize=64)  # every layer needs the same, and a copy to the device synchronizes
def _bounds(lengths: tuple[int, ...], on: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(on)


class CpuKernel:
    """One call per batch of similar lengths: whole score matrices if these are small, else torch's tiled kernel."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sequences: VarlenSequences) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        precise = torch.promote_types(query.dtype, torch.float32)
        output, total = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=precise)
        for queries, keys in _batches(sequences, query.device):
            inputs = queries.of(query), keys.of(key), keys.of(value)
            attend = whole_scores.forward if _is_small(queries, keys) else _tiled_forward
            found = attend(*inputs, Scores(sequences.scale, sequences.is_causal))
            for whole, each in zip((output, total), found, strict=True):
                queries.put(whole, each)
        return output, total

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, merged: Merged, sequences: VarlenSequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for queries, keys in _batches(sequences, query.device):
            gradient, output, total = map(queries.of, merged)
            # Padding repeats a token, whose keys would get the gradient twice.
            gradient = gradient.masked_fill(~queries.is_real[..., None, None], 0)
            inputs = queries.of(query), keys.of(key), keys.of(value), gradient, output, total
            derive = whole_scores.backward if _is_small(queries, keys) else _tiled_backward
            found = derive(*inputs, Scores(sequences.scale, sequences.is_causal))
            for whole, each, places in zip(results, found, (queries, keys, keys), strict=True):
                places.put(whole, each)
        return results


class _Places:
    """The tokens of N sequences, each padded to the longest by repeating its last."""

    def __init__(self, starts: list[int], lengths: list[int], on: torch.device) -> None:
        self.longest = max(lengths)
        self._only = slice(starts[0], starts[0] + lengths[0]) if len(starts) == 1 else None
        """A single sequence is not copied."""
        self._index, self.is_real = padded_index(starts, lengths, on)
        """long[N, H] and bool[N, H]"""

    def of(self, values: Tensor) -> Tensor:
        """Values [T, ...] as [N, H, ...]."""
        if self._only is not None:
            return values[None, self._only]
        return values[self._index.flatten()].unflatten(0, self._index.shape)

    def put(self, whole: Tensor, values: Tensor) -> None:
        """Put values [N, H, ...] to their tokens in `whole` [T, ...]."""
        if self._only is not None:
            whole[self._only] = values[0]
        else:
            whole[self._index[self.is_real]] = values[self.is_real]


def _is_small(queries: _Places, keys: _Places) -> bool:
    """Whether computing all scores is faster on a CPU than torch's tiled kernel, and fits in memory."""
    return queries.longest * keys.longest <= WHOLE_SCORES_UP_TO**2


def _batches(sequences: VarlenSequences, on: torch.device) -> Iterator[tuple[_Places, _Places]]:
    """Queries and keys of sequences that are computed together."""
    if sequences.is_causal:
        # Padding comes after all tokens of a sequence, where the causal mask hides it.
        for starts, lengths in batches_of_similar_length(list(accumulate(sequences.queries, initial=0))):
            together = [(starts, lengths)]
            if min(lengths) >= ALONE_FROM:
                together = [([start], [length]) for start, length in zip(starts, lengths, strict=True)]
            for each in together:
                places = _Places(*each, on)
                yield places, places
        return
    query = key = 0
    for queries, keys in zip(sequences.queries, sequences.keys, strict=True):
        yield _Places([query], [queries], on), _Places([key], [keys], on)
        query, key = query + queries, key + keys


def _tiled_forward(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """See `whole_scores.forward`."""
    output, total = cpu_flash_forward(*by_head(query, key, value), 0.0, scores.is_causal, scale=scores.scale)
    return output.transpose(1, 2), total.transpose(1, 2)


def _tiled_backward(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, output: Tensor, total: Tensor, scores: Scores
) -> tuple[Tensor, ...]:
    """See `whole_scores.backward`."""
    whole = (each.transpose(1, 2) for each in (output, total))
    found = cpu_flash_backward(
        gradient.transpose(1, 2), *by_head(query, key, value), *whole, 0.0, scores.is_causal, scale=scores.scale
    )
    return tuple(
        _summed(each.transpose(1, 2), of.shape[2]) for each, of in zip(found, (query, key, value), strict=True)
    )


def _summed(values: Tensor, groups: int) -> Tensor:
    """[N, H, heads, width], the sum of the heads that share one of the groups."""
    return values if values.shape[2] == groups else values.unflatten(2, (groups, -1)).sum(3)


cpu_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Output, and log-sum-exps [N, heads, H], of `by_head` queries, keys and values."""
cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_flash_forward = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward
