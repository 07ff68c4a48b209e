"""Copies of a rank's tensors in host memory that is allocated once and reused."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext import device

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class HostTensor:
    """A tensor's bytes on the host, in consecutive pieces (uint8)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Sequence[Tensor]

    def copy_to(self, tensor: Tensor) -> None:
        """Write the bytes to a contiguous tensor of the same dtype and shape."""
        parts = tensor.detach().view(-1).view(torch.uint8).split([len(piece) for piece in self.pieces])
        for part, piece in zip(parts, self.pieces, strict=True):
            part.copy_(piece)


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8[N]: the bytes of a tensor; a view of its memory if it is contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def on_host(tensor: Tensor) -> HostTensor:
    """A tensor in one piece on the host; a view if it is already there and contiguous."""
    return HostTensor(tensor.dtype, tuple(tensor.shape), [bytes_of(tensor.cpu())])


class HostCopies:
    """Copies tensors into buckets of host memory, pinned if there is a GPU. Buckets are added as needed and reused."""

    def __init__(self, bucket_bytes: int = device.HOST_BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Tensor] = []
        self._end = 0

    def of(self, tensors: Sequence[Tensor]) -> Iterator[HostTensor]:
        """Copy the `tensors`, in order; the next call of this method overwrites the copies.

        The copies run on a stream of their own, which does not wait for work queued elsewhere: work that writes to the
        `tensors` must have finished.
        """
        self._end = 0
        return self.more(tensors)

    def more(self, tensors: Sequence[Tensor]) -> Iterator[HostTensor]:
        """Copy the `tensors` after the existing copies, which stay valid. See `of`."""
        starts, end = [], self._end
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        while len(self._buckets) * self._bucket_bytes < end:
            self._buckets.append(device.host_memory(self._bucket_bytes))
        self._end = end
        copies, stream = [], device.SideStream()
        with stream.entered():
            for tensor, start in zip(tensors, starts, strict=True):
                pieces = self._pieces(start, tensor.nbytes)
                parts = bytes_of(tensor).split([len(piece) for piece in pieces])
                for piece, part in zip(pieces, parts, strict=True):
                    piece.copy_(part, non_blocking=True)
                copies.append(HostTensor(tensor.dtype, tuple(tensor.shape), pieces))
        stream.synchronize()
        return iter(copies)

    def _pieces(self, start: int, nbytes: int) -> list[Tensor]:
        """Views of `nbytes` bytes from `start` on, with the buckets taken as one contiguous memory."""
        pieces, end = [], start + nbytes
        while start < end:
            number, offset = divmod(start, self._bucket_bytes)
            pieces.append(self._buckets[number][offset : offset + end - start])
            start += len(pieces[-1])
        return pieces
