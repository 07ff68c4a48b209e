"""Packs a message into a bucket and unpacks it: views that are made once and copied in every refit by the kernels."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from converters.boxes import Box
from megarl.resharding.direct.messages import Message, Piece, parts
from megarl.resharding.kernels import Block, gather, scatter

_End: TypeAlias = Literal["source", "destination"]

# A block of this size is still in a processor's cache when it is checksummed after the copy.
_HOST_BLOCK_BYTES = 2**20
# A kernel on a GPU moves a message at once, and counts the elements of a box with 32 bits.
_DEVICE_BOX_BYTES = 2**30


def blocks(message: Message, bucket: Tensor, tensors: Mapping[str, Tensor], end: _End) -> list[Block]:
    """The views of `message` at its source or its destination, where `bucket` (uint8) and `tensors` lie.

    Together the blocks hold each element of the message once. Their views stay good as long as the tensors' memory.
    Raises ValueError for a box that leads out of its tensor.
    """
    on_host = bucket.device.type == "cpu"
    of_block, of_box = (_HOST_BLOCK_BYTES,) * 2 if on_host else (message.size_bytes, _DEVICE_BOX_BYTES)
    return [_block(boxes, bucket) for boxes in _runs(_boxes(message.pieces, tensors, end, of_box), of_block)]


def pack(message: Sequence[Block], *, with_checksum: bool) -> int | None:
    """Copy this rank's boxes into the bucket, converting them to the destination's types; the checksum if asked for."""
    return _one_after_the_other(gather, message, with_checksum)


def unpack(message: Sequence[Block], *, with_checksum: bool) -> int | None:
    """Copy the boxes out of the bucket into this rank's tensors; the checksum of what was copied, if asked for."""
    return _one_after_the_other(scatter, message, with_checksum)


def differing(message: Sequence[Block]) -> Iterator[str]:
    """The names of local tensors in which a byte is not that of the bucket; nothing is written."""
    for block in message:
        for name, packed, local in zip(block.names, block.packed, block.local, strict=True):
            if not torch.equal(_as_bytes(packed), _as_bytes(local)):
                yield name


def _one_after_the_other(
    kernel: Callable[[Block, int | None], int | None], message: Sequence[Block], with_checksum: bool
) -> int | None:
    total = 0 if with_checksum else None
    with torch.no_grad():
        for block in message:
            total = kernel(block, total)
    return total


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
