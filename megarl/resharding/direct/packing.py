"""Packs a message into a bucket and unpacks it: views that are made once and copied in every refit; checksums."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from isal import isal_zlib
from torch import Tensor

from converters.boxes import Box
from megarl.resharding.direct.messages import Message, Piece, parts

_End: TypeAlias = Literal["source", "destination"]

# A block of this size is still in a processor's cache when it is checksummed after the copy.
_HOST_BLOCK_BYTES = 2**20
_CHUNK_WORDS = 2**22
_MASK = 2**64 - 1
# Odd, so that a multiplication loses nothing modulo 2^64; from Knuth's linear congruential generator MMIX.
_FACTOR = 6364136223846793005


@dataclass(frozen=True)
class Block:
    """Neighbouring boxes of a message: `packed` are views of `memory` (uint8), `local` of this rank's tensors.

    Example: the first MiB of a message: `memory` uint8 [1_048_576], 16 `packed` views of it, 16 `local` views of the
    parameters in `names`.
    """

    memory: Tensor
    packed: list[Tensor]
    local: list[Tensor]
    names: list[str]
    """Names of the local tensors."""


def blocks(message: Message, bucket: Tensor, tensors: Mapping[str, Tensor], end: _End) -> list[Block]:
    """The views of `message` at its source or its destination, where `bucket` (uint8) and `tensors` lie.

    Together the blocks hold each element of the message once. Their views stay good as long as the tensors' memory.
    Raises ValueError for a box that leads out of its tensor.
    """
    limit = _HOST_BLOCK_BYTES if bucket.device.type == "cpu" else message.size_bytes
    return [_block(boxes, bucket) for boxes in _runs(_boxes(message.pieces, tensors, end, limit), limit)]


def pack(message: Sequence[Block], *, with_checksum: bool) -> int | None:
    """Copy this rank's boxes into the bucket, converting them to the destination's types; the checksum if asked for."""
    total = 0
    with torch.no_grad():
        for block in message:
            torch._foreach_copy_(block.packed, block.local)
            if with_checksum:
                total = checksum(block.memory, total)
    return total if with_checksum else None


def unpack(message: Sequence[Block], *, with_checksum: bool) -> int | None:
    """Copy the boxes out of the bucket into this rank's tensors; the checksum of what was copied, if asked for."""
    total = 0
    with torch.no_grad():
        for block in message:
            if with_checksum:
                total = checksum(block.memory, total)
            torch._foreach_copy_(block.local, block.packed)
    return total if with_checksum else None


def differing(message: Sequence[Block]) -> Iterator[str]:
    """The names of local tensors in which a byte is not that of the bucket; nothing is written."""
    for block in message:
        for name, packed, local in zip(block.names, block.packed, block.local, strict=True):
            if not torch.equal(_as_bytes(packed), _as_bytes(local)):
                yield name


@dataclass(frozen=True, slots=True)
class _LocalBox:
    name: str
    view: Tensor
    dtype: torch.dtype
    start: int
    stop: int


def _boxes(pieces: Iterable[Piece], tensors: Mapping[str, Tensor], end: _End, limit: int) -> Iterator[_LocalBox]:
    for piece in pieces:
        name, box = (
            (piece.source_name, piece.source_box)
            if end == "source"
            else (piece.destination_name, piece.destination_box)
        )
        if box.intersect(Box.whole(tensors[name].shape)) != box:
            raise ValueError(f"{box} leads out of {name}, which has shape {list(tensors[name].shape)}")
        start, size = piece.offset_bytes, piece.dtype.itemsize
        for part in parts(box.shape, limit // size):
            stop = start + part.size * size
            yield _LocalBox(name, tensors[name][part.shift(box.start).slices()], piece.dtype, start, stop)
            start = stop


def _runs(boxes: Iterable[_LocalBox], limit: int) -> Iterator[list[_LocalBox]]:
    """Neighbours that together reach over `limit` bytes at most."""
    run: list[_LocalBox] = []
    for box in boxes:
        if run and box.stop - run[0].start > limit:
            yield run
            run = []
        run.append(box)
    if run:
        yield run


def _block(boxes: Sequence[_LocalBox], bucket: Tensor) -> Block:
    packed = [bucket[box.start : box.stop].view(box.dtype).view(box.view.shape) for box in boxes]
    memory = bucket[boxes[0].start : boxes[-1].stop]
    return Block(memory, packed, [box.view for box in boxes], [box.name for box in boxes])


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def checksum(memory: Tensor, before: int = 0) -> int:
    """A checksum of `memory` (uint8, one dimension), continued from that of the memory `before` it.

    On the host a CRC-32; on a device, whose `memory` has to be a multiple of 4 bytes, `weighted_sum`.
    """
    if memory.device.type == "cpu":
        return isal_zlib.crc32(memory.numpy(), before)
    return weighted_sum(memory, before)


def weighted_sum(memory: Tensor, before: int = 0) -> int:
    """The sum of all 32-bit words of `memory`, each times its position in a chunk, modulo 2^64.

    A changed word, two words in each other's place and chunks in another order all give another sum.
    """
    total = before
    words = memory.view(torch.int32)
    for chunk in words.split(_CHUNK_WORDS):
        positions = torch.arange(1, len(chunk) + 1, dtype=torch.int64, device=memory.device)
        total = (total * _FACTOR + int((chunk * positions).sum())) & _MASK
    return total
