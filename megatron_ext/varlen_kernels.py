"""Kernels for attention of stretches of several lengths, with the log-sum-exps by which parts are merged."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_ext.attention import batches_of_similar_length, padded_index

_WIDEST_HEAD, _HEAD_STEP = 256, 8
"""Limits of the fused kernel for CUDA."""


class Stretches(NamedTuple):
    """The queries of each of N stretches look at the keys of another; all lie end to end.

    Where `is_causal` both are of the same tokens, and each looks at itself and those before it.
    """

    queries: tuple[int, ...]
    """Lengths."""
    keys: tuple[int, ...]
    """Lengths."""
    is_causal: bool
    scale: float


class Merged(NamedTuple):
    """Attention of queries to all their keys."""

    gradient: Tensor
    """With respect to the output."""
    output: Tensor
    total: Tensor
    """Log-sum-exps."""


class Kernel(Protocol):
    """Queries are [Q, heads, width], keys and values [K, groups, width]."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, stretches: Stretches) -> tuple[Tensor, Tensor]:
        """Output, and float32[Q, heads], the log-sum-exp of each query's scores."""
        ...

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, merged: Merged, stretches: Stretches
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value: their part where `merged` is of more keys than these."""
        ...


def kernel_for(query: Tensor) -> Kernel | None:
    """The kernel for queries of this device, type and width, if there is one."""
    if query.device.type == "cpu":
        return CpuKernel()
    width = query.shape[-1]
    is_fused = query.dtype in (torch.bfloat16, torch.float16) and width <= _WIDEST_HEAD and width % _HEAD_STEP == 0
    return CudaKernel() if query.device.type == "cuda" and is_fused else None


class CudaKernel:
    """Flash attention as torch has it: one call for all stretches."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, stretches: Stretches) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        sizes = _sizes(stretches, query.device)
        options = 0.0, stretches.is_causal, False
        output, total, *_ = _flash_forward(query, key, value, *sizes, *options, scale=stretches.scale)
        return output, total.t()

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, merged: Merged, stretches: Stretches
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        # The kernel takes the log-sum-exps to lie row by row, and random numbers, which nothing reads without dropout.
        total, unused = merged.total.t().contiguous(), torch.zeros(2, dtype=torch.uint64, device=query.device)
        return _flash_backward(
            merged.gradient.contiguous(),
            query,
            key,
            value,
            merged.output,
            total,
            *_sizes(stretches, query.device),
            0.0,
            stretches.is_causal,
            unused,
            unused,
            scale=stretches.scale,
        )


def _sizes(stretches: Stretches, on: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Bounds and longest stretch, of queries and keys."""
    return (
        _bounds(stretches.queries, on),
        _bounds(stretches.keys, on),
        max(stretches.queries),
        max(stretches.keys),
    )


@lru_cache(maxsize=64)  # every layer has the same, and a copy to the device waits for it
def _bounds(lengths: tuple[int, ...], on: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(on)


class CpuKernel:
    """torch's tiled kernel for CPUs: one call for stretches of similar length."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, stretches: Stretches) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        output, total = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
        for queries, keys in _batches(stretches, query.device):
            inputs = queries.of(query), *keys.of_heads(query.shape[1], key, value)
            found = _forward(*inputs, 0.0, stretches.is_causal, scale=stretches.scale)
            for whole, each in zip((output, total), found, strict=True):
                queries.put(whole, each)
        return output, total

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, merged: Merged, stretches: Stretches
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for queries, keys in _batches(stretches, query.device):
            gradient, output, total = map(queries.of, merged)
            # Padding repeats a token, whose keys would be given the gradient again.
            gradient = gradient.masked_fill(~queries.is_real[:, None, :, None], 0)
            inputs = queries.of(query), *keys.of_heads(query.shape[1], key, value)
            found = _backward(gradient, *inputs, output, total, 0.0, stretches.is_causal, scale=stretches.scale)
            for whole, each, places in zip(results, found, (queries, keys, keys), strict=True):
                repeats = query.shape[1] // whole.shape[1]
                places.put(whole, each if repeats == 1 else each.unflatten(1, (-1, repeats)).sum(2))
        return results


class _Places:
    """The tokens of N stretches, each padded to the longest by repeating its last."""

    def __init__(self, starts: list[int], lengths: list[int], on: torch.device) -> None:
        self._only = slice(starts[0], starts[0] + lengths[0]) if len(starts) == 1 else None
        """One stretch is no copy."""
        self._index, self.is_real = padded_index(starts, lengths, on)
        """long[N, H] and bool[N, H]"""

    def of(self, values: Tensor) -> Tensor:
        """Values [T, heads, ...] as [N, heads, H, ...]."""
        if self._only is not None:
            return values[None, self._only].transpose(1, 2)
        return values[self._index.flatten()].unflatten(0, self._index.shape).transpose(1, 2)

    def of_heads(self, heads: int, *values: Tensor) -> Iterator[Tensor]:
        """Values [T, groups, width] as [N, heads, H, width], repeated for the heads that share them."""
        for each in values:
            repeats = heads // each.shape[1]
            found = self.of(each)
            yield found if repeats == 1 else found.repeat_interleave(repeats, dim=1)

    def put(self, whole: Tensor, values: Tensor) -> None:
        """Put values [N, heads, H, ...] to their tokens in `whole` [T, heads, ...]."""
        if self._only is not None:
            whole[self._only] = values[0].transpose(0, 1)
        else:
            whole[self._index[self.is_real]] = values.transpose(1, 2)[self.is_real]


def _batches(stretches: Stretches, on: torch.device) -> Iterator[tuple[_Places, _Places]]:
    """Queries and keys of stretches that are computed together."""
    if stretches.is_causal:
        # Padding comes after all tokens of a stretch, where the causal mask hides it.
        for starts, lengths in batches_of_similar_length(list(accumulate(stretches.queries, initial=0))):
            places = _Places(starts, lengths, on)
            yield places, places
        return
    query = key = 0
    for queries, keys in zip(stretches.queries, stretches.keys, strict=True):
        yield _Places([query], [queries], on), _Places([key], [keys], on)
        query, key = query + queries, key + keys


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_flash_forward = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward
