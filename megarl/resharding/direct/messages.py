"""Messages: what one source rank sends to one destination rank, cut into pieces that fit a bucket.

Sender and receiver each derive the same messages from the transfers of their pair, and only compare digests.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from converters.boxes import Box
from converters.errors import UserError
from converters.layout import Shape
from converters.number_formats import NUMBER_FORMATS, NumberFormat
from megarl.resharding.alignment import ALIGNMENT_BYTES, aligned
from megarl.resharding.direct.typed_transfers import Scales, TypedTransfer


@dataclass(frozen=True, slots=True)
class PieceScales:
    """The scales of a piece that is quantised at its source. They follow the codes, `offset_bytes` into the bucket."""

    destination_name: str
    destination_box: Box
    format_name: str
    """Name of the number format of codes and scales."""
    offset_bytes: int

    @property
    def number_format(self) -> NumberFormat:
        """The number format of codes and scales."""
        return NUMBER_FORMATS[self.format_name]

    @property
    def size_bytes(self) -> int:
        """Size without the padding that aligns the next piece."""
        return self.destination_box.size * self.number_format.scales.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a source tensor, and the box of a destination tensor that it fills.

    In the bucket it is contiguous, in the destination's `dtype`, at `offset_bytes`.

    Example: `Piece("linear_fc2.weight", Box((0, 0), (64, 128)), "down_proj.weight", Box((64, 0), (128, 128)),
    torch.bfloat16, offset_bytes=0)` has 16 KiB.
    """

    source_name: str
    source_box: Box
    destination_name: str
    destination_box: Box
    dtype: torch.dtype
    offset_bytes: int
    scales: PieceScales | None = None
    """Present if the piece is quantised at the source; `dtype` is then that of the codes."""

    @property
    def size_bytes(self) -> int:
        """Size without scales and without the padding that aligns the next piece."""
        return self.source_box.size * self.dtype.itemsize

    @property
    def end_bytes(self) -> int:
        """The aligned end of codes and scales in a bucket."""
        if self.scales is None:
            return self.offset_bytes + aligned(self.size_bytes)
        return self.scales.offset_bytes + aligned(self.scales.size_bytes)


@dataclass(frozen=True, slots=True)
class Message:
    """Pieces that travel together; `size_bytes` is a multiple of the alignment.

    Example: `Message((piece_of_64_rows, piece_of_a_norm), size_bytes=16_640)`.
    """

    pieces: tuple[Piece, ...]
    size_bytes: int


def cut_into_messages(typed_transfers: Iterable[TypedTransfer], bucket_bytes: int) -> list[Message]:
    """Cut the typed transfers of a pair of ranks, in order, into messages of at most `bucket_bytes`.

    A transfer larger than a bucket is cut along its first dimensions; one that is quantised is cut between its blocks.
    Raises UserError if a bucket cannot hold a single element or block.
    """
    if bucket_bytes < ALIGNMENT_BYTES:
        raise UserError(
            f"refit.bucket_bytes is {bucket_bytes}, and the smallest piece of a message takes {ALIGNMENT_BYTES}: raise "
            "refit.bucket_bytes, by default it is 512 MiB"
        )
    room = bucket_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    messages: list[Message] = []
    pieces: list[Piece] = []
    end = 0
    for typed_transfer in typed_transfers:
        for part in _parts_of(typed_transfer, room):
            piece = _piece(typed_transfer, part, end)
            if piece.end_bytes > room:
                messages.append(Message(tuple(pieces), end))
                pieces, piece = [], _piece(typed_transfer, part, 0)
            pieces.append(piece)
            end = piece.end_bytes
    if pieces:
        messages.append(Message(tuple(pieces), end))
    return messages


def _parts_of(typed_transfer: TypedTransfer, room: int) -> Iterator[Box]:
    shape = typed_transfer.source_box.shape
    if typed_transfer.scales is None:
        yield from parts(shape, room // typed_transfer.dtype.itemsize)
        return
    number_format = NUMBER_FORMATS[typed_transfer.scales.number_format]
    block = number_format.block_in(shape)
    block_bytes = math.prod(block) * typed_transfer.dtype.itemsize + number_format.scales.itemsize
    blocks = (room - 2 * ALIGNMENT_BYTES) // block_bytes
    if blocks < 1:
        needed = aligned(block_bytes + 2 * ALIGNMENT_BYTES)
        raise UserError(f"refit.bucket_bytes is too small for a quantised block: raise it to {2 * needed} or more")
    yield from parts_of_blocks(shape, block, blocks)


def parts_of_blocks(shape: Shape, block: tuple[int, int], blocks: int) -> Iterator[Box]:
    """Cut a matrix of `shape` between its blocks into boxes of at most `blocks` blocks, in order."""
    for part in parts(tuple(-(-length // size) for length, size in zip(shape, block, strict=True)), blocks):
        start = tuple(at * size for at, size in zip(part.start, block, strict=True))
        stop = (min(at * size, length) for at, size, length in zip(part.stop, block, shape, strict=True))
        yield Box(start, tuple(stop))


def parts(shape: Shape, elements: int) -> Iterator[Box]:
    """Cut a tensor of `shape` along its first dimensions into boxes of at most `elements` (1 or more), in order.

    Each box is contiguous in the tensor.
    """
    rows = elements // max(1, math.prod(shape[1:]))
    if not shape or rows >= shape[0]:
        yield Box.whole(shape)
    elif rows:
        for start in range(0, shape[0], rows):
            stop = min(start + rows, shape[0])
            yield Box((start, *(0 for _ in shape[1:])), (stop, *shape[1:]))
    else:
        for index in range(shape[0]):
            for box in parts(shape[1:], elements):
                yield Box((index, *box.start), (index + 1, *box.stop))


def digest(messages: Sequence[Message]) -> str:
    """A digest that is equal for two ranks if, and only if, they derived the same messages."""
    hashed = hashlib.blake2b(digest_size=16)
    for message in messages:
        hashed.update(repr(message).encode())
    return hashed.hexdigest()


def _piece(typed_transfer: TypedTransfer, part: Box, offset_bytes: int) -> Piece:
    size = aligned(part.size * typed_transfer.dtype.itemsize)
    return Piece(
        typed_transfer.source_name,
        part.shift(typed_transfer.source_box.start),
        typed_transfer.destination_name,
        part.shift(typed_transfer.destination_box.start),
        typed_transfer.dtype,
        offset_bytes,
        _piece_scales(typed_transfer.scales, part, offset_bytes + size) if typed_transfer.scales else None,
    )


def _piece_scales(scales: Scales, part: Box, offset_bytes: int) -> PieceScales:
    box = NUMBER_FORMATS[scales.number_format].scales_box(part).shift(scales.box.start)
    return PieceScales(scales.name, box, scales.number_format, offset_bytes)
