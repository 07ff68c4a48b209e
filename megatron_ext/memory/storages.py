"""Memory of tensors that goes to the host and comes back, while the tensors and all their views stay what they are."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext import device

# Scalars, such as the step counts of Adam, take longer to move than they are worth.
_SMALLEST_BYTES = 2**10


class _Piece(NamedTuple):
    """Bytes of a storage, from `start` on, and where they lie in a bucket."""

    storage: torch.UntypedStorage
    start: int
    nbytes: int
    offset: int
    size: int
    """Bytes of the whole storage."""


@dataclass(frozen=True)
class _Bucket:
    """Memory of the host (uint8), and the pieces in it; the pieces of a storage follow each other over buckets.

    Example: _Bucket(memory, [_Piece(storage, start=0, nbytes=4096, offset=0, size=4096)])
    """

    memory: Tensor
    pieces: list[_Piece]


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages of tensors on this process's device, each once however many views there are; small ones left out."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= _SMALLEST_BYTES and storage.device.type == device.device().type:
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def nbytes_of(storages: Iterable[torch.UntypedStorage]) -> int:
    """How much memory of the device they hold."""
    return sum(storage.nbytes() for storage in storages)


class HostCopy:
    """Storages whose bytes are on the host; on the device they have no memory until `reload`.

    Nobody may read or write their tensors in between. Bytes go in buckets, so that no more than one of them is on both
    sides at a time.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage], bucket_bytes: int = device.HOST_BUCKET_BYTES) -> None:
        # Nothing that was asked of the device before may still read or write them.
        device.synchronize()
        self.nbytes = nbytes_of(storages)
        self._buckets: list[_Bucket] = []
        stream = device.SideStream()
        for pieces in _cut(storages, bucket_bytes):
            bucket = _Bucket(device.host_memory(sum(piece.nbytes for piece in pieces)), pieces)
            with stream.entered():
                for piece in pieces:
                    _of_host(bucket, piece).copy_(_of_device(piece), non_blocking=True)
            stream.synchronize()
            for piece in pieces:
                if piece.start + piece.nbytes == piece.size:
                    free(piece.storage)
            self._buckets.append(bucket)
        device.empty_cache()

    def reload(self) -> None:
        """Give the storages their memory and bytes back; the copy is empty then.

        Where the device has no room (torch.OutOfMemoryError) they have none of it, and the copy is as it was.
        """
        try:
            self._copy_back()
        except torch.OutOfMemoryError:
            for piece in (piece for bucket in self._buckets for piece in bucket.pieces):
                free(piece.storage)
            device.empty_cache()
            raise
        self._buckets, self.nbytes = [], 0

    def _copy_back(self) -> None:
        device.synchronize()
        stream = device.SideStream()
        for bucket in self._buckets:
            for piece in bucket.pieces:
                if piece.start == 0:
                    piece.storage.resize_(piece.size)
            device.synchronize()
            with stream.entered():
                for piece in bucket.pieces:
                    _of_device(piece).copy_(_of_host(bucket, piece), non_blocking=True)
            stream.synchronize()


def free(storage: torch.UntypedStorage) -> None:
    """Give its memory back, whose bytes are lost."""
    if not storage.resizable():
        raise RuntimeError(f"{storage.nbytes()} bytes of a tensor belong to somebody else, and cannot be given back")
    storage.resize_(0)


def _cut(storages: Sequence[torch.UntypedStorage], bucket_bytes: int) -> Iterator[list[_Piece]]:
    """The bytes of all storages, end to end, cut into buckets."""
    pieces: list[_Piece] = []
    filled = 0
    for storage in storages:
        start, size = 0, storage.nbytes()
        while start < size:
            nbytes = min(size - start, bucket_bytes - filled)
            pieces.append(_Piece(storage, start, nbytes, filled, size))
            start, filled = start + nbytes, filled + nbytes
            if filled == bucket_bytes:
                yield pieces
                pieces, filled = [], 0
    if pieces:
        yield pieces


def _of_host(bucket: _Bucket, piece: _Piece) -> Tensor:
    return bucket.memory[piece.offset : piece.offset + piece.nbytes]


def _of_device(piece: _Piece) -> Tensor:
    storage = piece.storage
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole[piece.start : piece.start + piece.nbytes]
