"""Zero-copy pieces: large ones that are contiguous at both ends are read from tensor to tensor, without the buckets.

The guarantees of a transfer stay the same. A message has the same checksum, computed over the tensors themselves. It is
acknowledged once it has arrived, and until then the source's tensors do not change. A refit that fails leaves the
engine fenced.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from converters.boxes import Box
from converters.layout import Shape
from megarl.resharding.direct.messages import Message, Piece
from megarl.resharding.direct.messages_by_peer import MessagesByPeer
from megarl.resharding.direct.transports.endpoint import Readable, ZeroCopyPiece

SMALLEST_BYTES = 2**18
"""Smallest piece that is worth a read of its own, in bytes."""


def shared_tensors(messages: MessagesByPeer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The source's tensors of which at least one piece may be read in place."""
    names = {
        piece.source_name
        for of_peer in messages.values()
        for message in of_peer
        for piece in message.pieces
        if _is_worth_it(piece)
    }
    return {name: tensor for name, tensor in tensors.items() if name in names and tensor.is_contiguous()}


def zero_copy_pieces(
    messages: Sequence[Message], readable: Mapping[str, Readable], tensors: Mapping[str, Tensor]
) -> dict[int, dict[int, ZeroCopyPiece]]:
    """The pieces that a destination can read without the buckets: message number -> piece number -> piece.

    `readable` are the source's tensors, `tensors` those of the destination.
    """
    found: dict[int, dict[int, ZeroCopyPiece]] = {}
    for number, message in enumerate(messages):
        for place, piece in enumerate(message.pieces):
            if piece.source_name in readable and _is_worth_it(piece):
                zero_copy = _zero_copy(piece, readable[piece.source_name], tensors[piece.destination_name])
                if zero_copy is not None:
                    found.setdefault(number, {})[place] = zero_copy
    return found


def _is_worth_it(piece: Piece) -> bool:
    return piece.scales is None and piece.size_bytes >= SMALLEST_BYTES


def _zero_copy(piece: Piece, there: Readable, here: Tensor) -> ZeroCopyPiece | None:
    offset = _offset(piece.source_box, there.shape)
    into = here[piece.destination_box.slices()]
    if offset is None or not (there.dtype == piece.dtype == here.dtype) or not _is_on_host_in_one(into):
        return None
    if into.nbytes != piece.size_bytes:
        raise ValueError(f"{piece.destination_box} leads out of {piece.destination_name}")
    address = there.address + offset * piece.dtype.itemsize
    place = into.view(-1).view(torch.uint8)
    return ZeroCopyPiece(piece.offset_bytes, piece.end_bytes, address, piece.size_bytes, place, place.data_ptr())


def _is_on_host_in_one(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _offset(box: Box, shape: Shape) -> int | None:
    """The index of a box's first element in a contiguous tensor of `shape`; None if the box is not contiguous."""
    if box.intersect(Box.whole(shape)) != box:
        return None
    first = next((number for number, length in enumerate(box.shape) if length > 1), len(shape))
    if box.shape[first + 1 :] != tuple(shape[first + 1 :]):
        return None
    offset = 0
    for start, length in zip(box.start, shape, strict=True):
        offset = offset * length + start
    return offset
