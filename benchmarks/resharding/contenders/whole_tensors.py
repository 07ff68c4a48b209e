"""Buckets of whole HuggingFace tensors, and the copies between them, gathered data, and the tensors of a rank."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from converters.boxes import Box
from converters.layout import Shape
from converters.plan import Transfer
from megarl.resharding.direct.messages import ALIGNMENT_BYTES

DTypes = Mapping[str, torch.dtype]


@dataclass(frozen=True)
class Bucket:
    """HuggingFace tensors that are sent together; name -> offset in bytes."""

    offsets: Mapping[str, int]
    size_bytes: int

    def tensors(self, memory: Tensor, shapes: Mapping[str, Shape], dtypes: DTypes) -> dict[str, Tensor]:
        """Its tensors in `memory` (uint8)."""
        return {name: _view(memory, offset, shapes[name], dtypes[name]) for name, offset in self.offsets.items()}

    def of(self, transfers: Iterable[Transfer]) -> list[Transfer]:
        """The transfers of parts of its tensors."""
        return [transfer for transfer in transfers if transfer.hf_name in self.offsets]


def buckets(names: Iterable[str], shapes: Mapping[str, Shape], dtypes: DTypes, bucket_bytes: int) -> list[Bucket]:
    """Split tensors, in order, into buckets of at most `bucket_bytes`, or of a single larger tensor."""
    found: list[Bucket] = []
    offsets: dict[str, int] = {}
    end = 0
    for name in names:
        size = _aligned(torch.Size(shapes[name]).numel() * dtypes[name].itemsize)
        if offsets and end + size > bucket_bytes:
            found.append(Bucket(offsets, end))
            offsets, end = {}, 0
        offsets[name] = end
        end += size
    return [*found, Bucket(offsets, end)] if offsets else found


@dataclass(frozen=True)
class Copies:
    """Pairs of views, created once and copied in every run."""

    into: list[Tensor]
    out_of: list[Tensor]

    def run(self) -> None:
        """Copy all pairs."""
        if self.into:
            torch._foreach_copy_(self.into, self.out_of)

    def then(self, other: "Copies") -> "Copies":
        """Both sets of copies."""
        return Copies([*self.into, *other.into], [*self.out_of, *other.out_of])


NO_COPIES = Copies([], [])


def packed_bytes(transfers: Iterable[Transfer], dtypes: DTypes) -> int:
    """Bytes of the transfers' data, each aligned."""
    return sum(_aligned(transfer.source_box.size * dtypes[transfer.hf_name].itemsize) for transfer in transfers)


def packed(transfers: Iterable[Transfer], memory: Tensor, dtypes: DTypes) -> list[Tensor]:
    """A view into `memory` (uint8) for the elements of each transfer, consecutively."""
    views, offset = [], 0
    for transfer in transfers:
        dtype = dtypes[transfer.hf_name]
        views.append(_view(memory, offset, transfer.source_box.shape, dtype))
        offset += _aligned(transfer.source_box.size * dtype.itemsize)
    return views


def box_of(tensor: Tensor, box: Box) -> Tensor:
    """The elements of a tensor in a box."""
    return tensor[box.slices()]


def _view(memory: Tensor, offset: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return memory[offset : offset + size].view(dtype).view(shape)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
