"""Messages: what one source rank sends to one destination rank, cut into pieces that fit a bucket.

Sender and receiver derive the same messages from the transfers of their pair and say no more about them than a digest.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from converters.boxes import Box
from converters.errors import UserError
from converters.layout import Shape
from converters.plan import Transfer
from megarl.resharding.alignment import ALIGNMENT_BYTES, aligned


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor of the source and the box of the destination's tensor that it fills.

    In between it lies contiguously, in the destination's `dtype`, `offset_bytes` after the start of a bucket.

    Example: `Piece("linear_fc2.weight", Box((0, 0), (64, 128)), "down_proj.weight", Box((64, 0), (128, 128)),
    torch.bfloat16, offset_bytes=0)` has 16 KiB.
    """

    source_name: str
    source_box: Box
    destination_name: str
    destination_box: Box
    dtype: torch.dtype
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """Without what aligns the next piece."""
        return self.source_box.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Message:
    """Pieces that travel together; `size_bytes` is a multiple of the alignment.

    Example: `Message((piece_of_64_rows, piece_of_a_norm), size_bytes=16_640)`.
    """

    pieces: tuple[Piece, ...]
    size_bytes: int


def cut_into_messages(
    transfers: Iterable[Transfer], dtypes: Mapping[str, torch.dtype], bucket_bytes: int
) -> list[Message]:
    """Cut the transfers of a pair of ranks, in their order, into messages of at most `bucket_bytes`.

    `dtypes` are those of the destination's tensors. A transfer that is larger than a bucket is cut along its first
    dimensions. Raises UserError if a bucket does not hold a single element.
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
    for transfer in transfers:
        dtype = dtypes[transfer.destination_name]
        for part in parts(transfer.source_box.shape, room // dtype.itemsize):
            size = aligned(part.size * dtype.itemsize)
            if end + size > room:
                messages.append(Message(tuple(pieces), end))
                pieces, end = [], 0
            pieces.append(_piece(transfer, part, dtype, end))
            end += size
    if pieces:
        messages.append(Message(tuple(pieces), end))
    return messages


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
    """The same for two ranks that derived the same messages, and only then."""
    hashed = hashlib.blake2b(digest_size=16)
    for message in messages:
        hashed.update(repr(message).encode())
    return hashed.hexdigest()


def _piece(transfer: Transfer, part: Box, dtype: torch.dtype, offset_bytes: int) -> Piece:
    return Piece(
        transfer.source_name,
        part.shift(transfer.source_box.start),
        transfer.destination_name,
        part.shift(transfer.destination_box.start),
        dtype,
        offset_bytes,
    )
