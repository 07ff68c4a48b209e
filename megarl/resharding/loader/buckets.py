"""Buckets: the HF tensors of a model, cut into pieces that fit a shared-memory segment."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from converters.errors import UserError
from megarl.resharding.alignment import aligned


@dataclass(frozen=True)
class Entry:
    """One whole HF tensor inside a bucket: contiguous, `offset_bytes` after the start of the segment.

    Example: `Entry("model.norm.weight", torch.bfloat16, (4096,), offset_bytes=64)`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together through segment number `segment`.

    Example: `Bucket(segment=1, entries=(entry, other))`.
    """

    segment: int
    entries: tuple[Entry, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the part of the segment that the entries reach over."""
        return max(entry.offset_bytes + _bytes(entry.shape, entry.dtype) for entry in self.entries)


def cut_into_buckets(
    hf_shapes: Mapping[str, tuple[int, ...]],
    hf_dtypes: Mapping[str, torch.dtype],
    bucket_bytes: int,
    segments: int = 2,
) -> list[Bucket]:
    """Cut a model into buckets of at most `bucket_bytes`, in the order of `hf_shapes`.

    Every tensor lies in exactly one bucket; consecutive buckets take turns on `segments` segments, so that one can be
    filled while another is read. Raises UserError if a tensor alone is larger than a bucket.
    """
    buckets: list[Bucket] = []
    entries: list[Entry] = []
    end = 0

    def close() -> None:
        if entries:
            buckets.append(Bucket(len(buckets) % segments, tuple(entries)))
            entries.clear()

    for name, shape in hf_shapes.items():
        size = _bytes(shape, hf_dtypes[name])
        if size > bucket_bytes:
            raise UserError(
                f"{name} has {size} bytes and refit.bucket_bytes is {bucket_bytes}: raise refit.bucket_bytes to {size} "
                "or more"
            )
        start = aligned(end)
        if start + size > bucket_bytes:
            close()
            start = 0
        entries.append(Entry(name, hf_dtypes[name], tuple(shape), start))
        end = start + size
    close()
    return buckets


def views(bucket: Bucket, memory: Tensor) -> dict[str, Tensor]:
    """The tensors of `bucket` as views of its segment's `memory` (uint8, one dimension), by HF name."""
    return {
        entry.name: memory[entry.offset_bytes : entry.offset_bytes + _bytes(entry.shape, entry.dtype)]
        .view(entry.dtype)
        .view(entry.shape)
        for entry in bucket.entries
    }


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
