"""Buckets: the HF tensors of a model, cut into pieces that fit a shared-memory segment."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from converters.boxes import Box
from converters.errors import UserError
from converters.number_formats import NUMBER_FORMATS, NumberFormat
from megarl.resharding.alignment import aligned
from megatron_ext import device


@dataclass(frozen=True)
class Entry:
    """One whole HF tensor inside a bucket: contiguous, at `offset_bytes` of the segment.

    If the engine holds the tensor in a number format, the entry has its codes and scales, or the values that the
    engine's worker quantises.

    Example: `Entry("model.norm.weight", torch.bfloat16, (4096,), offset_bytes=64)`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int
    number_format: str = ""
    """Number format in which the engine holds the tensor, a name of `NUMBER_FORMATS`; empty if none."""
    scales_offset_bytes: int | None = None
    """Offset of the contiguous scales, if `dtype` is that of codes."""

    @property
    def end_bytes(self) -> int:
        """End of the entry in the segment."""
        if self.scales_offset_bytes is None:
            return self.offset_bytes + _bytes(self.shape, self.dtype)
        return self.scales_offset_bytes + _bytes(self.scales_shape, NUMBER_FORMATS[self.number_format].scales)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """The shape of the tensor's scales."""
        return NUMBER_FORMATS[self.number_format].scales_box(Box.whole(self.shape)).shape


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together through segment number `segment`.

    Example: `Bucket(segment=1, entries=(entry, other))`.
    """

    segment: int
    entries: tuple[Entry, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the part of the segment that the entries span."""
        return max(entry.end_bytes for entry in self.entries)


@dataclass(frozen=True)
class Quantised:
    """The tensors that an engine holds in a number format.

    Example: all matrices of the layers are `names`, and `as_values` are those of `q_proj`, through whose blocks
    Megatron's groups of heads cut.
    """

    number_format: NumberFormat
    names: Collection[str]
    as_values: Collection[str] = ()
    """The subset of `names` that is sent as values, because some block is split over senders or codes share a byte."""


def cut_into_buckets(
    hf_shapes: Mapping[str, tuple[int, ...]],
    hf_dtypes: Mapping[str, torch.dtype],
    bucket_bytes: int,
    segments: int = 2,
    quantised: Quantised | None = None,
) -> list[Bucket]:
    """Cut a model into buckets of at most `bucket_bytes`, in the order of `hf_shapes`.

    Every tensor lies in exactly one bucket; consecutive buckets take turns on `segments` segments, so that one can be
    filled while another is read. Raises UserError if a tensor alone is larger than a bucket.
    """
    buckets: list[Bucket] = []
    entries: list[Entry] = []

    def close() -> None:
        if entries:
            buckets.append(Bucket(len(buckets) % segments, tuple(entries)))
            entries.clear()

    for name, shape in hf_shapes.items():
        size = _entry(name, shape, hf_dtypes[name], 0, quantised).end_bytes
        if size > bucket_bytes:
            raise UserError(
                f"{name} has {size} bytes and refit.bucket_bytes is {bucket_bytes}: raise refit.bucket_bytes to {size} "
                "or more"
            )
        start = aligned(entries[-1].end_bytes) if entries else 0
        if start + size > bucket_bytes:
            close()
            start = 0
        entries.append(_entry(name, shape, hf_dtypes[name], start, quantised))
    close()
    return buckets


def _entry(name: str, shape: tuple[int, ...], dtype: torch.dtype, start: int, quantised: Quantised | None) -> Entry:
    if quantised is None or name not in quantised.names:
        return Entry(name, dtype, tuple(shape), start)
    number_format = quantised.number_format
    if name in quantised.as_values:
        return Entry(name, dtype, tuple(shape), start, number_format.name)
    scales = start + aligned(_bytes(shape, number_format.codes))
    return Entry(name, number_format.codes, tuple(shape), start, number_format.name, scales)


def views(bucket: Bucket, memory: Tensor) -> dict[str, Tensor]:
    """The tensors of `bucket` as views of its segment's `memory` (uint8, one dimension), by HF name.

    Scales are named as in a checkpoint.
    """
    found = {}
    for entry in bucket.entries:
        found[entry.name] = _view(memory, entry.offset_bytes, entry.shape, entry.dtype)
        if entry.scales_offset_bytes is not None:
            number_format = NUMBER_FORMATS[entry.number_format]
            scales = _view(memory, entry.scales_offset_bytes, entry.scales_shape, number_format.scales)
            found[number_format.scales_name(entry.name)] = scales
    return found


def loadable(bucket: Bucket, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Host copies of the tensors of `bucket`, in the form that the engine's own loader takes.

    Values are quantised on this worker's device: a GPU worker has one CPU thread, in which a refit of 30B parameters in
    NVFP4 would take 14 minutes.
    """
    as_values = {entry.name: entry for entry in bucket.entries if entry.number_format}
    for name, view in views(bucket, memory).items():
        entry = as_values.get(name)
        if entry is None or entry.scales_offset_bytes is not None:
            yield name, view.clone()
        else:
            # Back to the host: a loader may hold all tensors of a layer until the last one comes, which a GPU may have
            # no room for.
            for made_name, made in NUMBER_FORMATS[entry.number_format].tensors(name, view.to(device.device())):
                yield made_name, made.to(view.device)


def _view(memory: Tensor, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return memory[offset_bytes : offset_bytes + _bytes(shape, dtype)].view(dtype).view(shape)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
