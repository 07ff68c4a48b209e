"""Host memory for a copy of what a rank saves or changes for a while, made once and used again by every save."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext import device

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class HostTensor:
    """Bytes of a tensor on the host, in pieces (uint8) that follow each other."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Sequence[Tensor]

    def copy_to(self, tensor: Tensor) -> None:
        """Write the bytes to a contiguous tensor of this type and shape."""
        parts = tensor.detach().view(-1).view(torch.uint8).split([len(piece) for piece in self.pieces])
        for part, piece in zip(parts, self.pieces, strict=True):
            part.copy_(piece)


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8[N]: the bytes of a tensor, which are its own memory where that is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def on_host(tensor: Tensor) -> HostTensor:
    """A tensor in one piece, which is its own memory where that is the host's already."""
    return HostTensor(tensor.dtype, tuple(tensor.shape), [bytes_of(tensor.cpu())])


class HostCopies:
    """Copies of tensors in buckets of host memory, as many as the longest list of them fills; pinned, beside a GPU."""

    def __init__(self, bucket_bytes: int = device.HOST_BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Tensor] = []
        self._end = 0

    def of(self, tensors: Sequence[Tensor]) -> Iterator[HostTensor]:
        """Copies of the `tensors`, in their order; they last until the next call of this method.

        Other work that was asked of the device may go on meanwhile, but for what changes the `tensors`.
        """
        self._end = 0
        return self.more(tensors)

    def more(self, tensors: Sequence[Tensor]) -> Iterator[HostTensor]:
        """Copies of the `tensors` behind those that there are, which last. See `of`."""
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
        """So many bytes from `start` on, as if the buckets were one memory."""
        pieces, end = [], start + nbytes
        while start < end:
            number, offset = divmod(start, self._bucket_bytes)
            pieces.append(self._buckets[number][offset : offset + end - start])
            start += len(pieces[-1])
        return pieces
