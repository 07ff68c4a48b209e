"""Moves the memory of tensors to the host and back, while the tensors and all their views stay valid objects."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext import device

# Moving scalars, such as Adam's step counts, would take time and free next to nothing.
_SMALLEST_BYTES = 2**10


class _Piece(NamedTuple):
    """`nbytes` bytes of a storage from `start` on, at `offset` in a bucket."""

    storage: torch.UntypedStorage
    start: int
    nbytes: int
    offset: int
    size: int
    """Size of the whole storage in bytes."""


@dataclass(frozen=True)
class _Bucket:
    """Host memory (uint8), and the pieces in it; a storage may continue in the next bucket.

    Example: _Bucket(memory, [_Piece(storage, start=0, nbytes=4096, offset=0, size=4096)])
    """

    memory: Tensor
    pieces: list[_Piece]


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages of the tensors on this process's device, each once, without those smaller than 1 KiB."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= _SMALLEST_BYTES and storage.device.type == device.device().type:
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def nbytes_of(storages: Iterable[torch.UntypedStorage]) -> int:
    """Total size of storages."""
    return sum(storage.nbytes() for storage in storages)


class HostCopy:
    """Storages whose bytes are on the host; on the device they have no memory until `reload`.

    Their tensors must not be accessed in between. Bytes move in buckets, to keep the memory that is held on both sides
    small.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage], bucket_bytes: int = device.HOST_BUCKET_BYTES) -> None:
        # Work queued on the device earlier may still read or write them.
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
        """Allocate the storages again and restore their bytes; the copy is empty afterwards.

        If the device has no room (torch.OutOfMemoryError), the storages stay without memory, and the copy is unchanged.
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
    """Free the memory of a storage; its bytes are lost. Raises RuntimeError if the storage does not own its memory."""
    if not storage.resizable():
        raise RuntimeError(f"{storage.nbytes()} bytes of a tensor belong to somebody else, and cannot be given back")
    storage.resize_(0)


def _cut(storages: Sequence[torch.UntypedStorage], bucket_bytes: int) -> Iterator[list[_Piece]]:
    """Cut the concatenated bytes of all storages into buckets."""
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
