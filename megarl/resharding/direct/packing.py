"""Packs a message into a bucket and unpacks it: views that are made once and copied in every refit by the kernels."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from converters.boxes import Box
from converters.layout import Shape
from megarl.resharding.direct.messages import Message, Piece, PieceScales, parts, parts_of_blocks
from megarl.resharding.kernels import Block, Quantised, gather, is_known, rule_of, scatter
from megatron_ext.memory.host_copies import bytes_of

_End: TypeAlias = Literal["source", "destination"]

# A pass of the host over so many bytes is still in the processor's cache when it is checksummed.
_HOST_BLOCK_BYTES = 2**20
# A kernel on a GPU counts the elements of a box with 32 bits.
_DEVICE_BOX_BYTES = 2**30


def blocks(
    message: Message,
    bucket: Tensor,
    tensors: Mapping[str, Tensor],
    end: _End,
    zero_copy: Collection[int] = (),
    *,
    in_bucket: bool = False,
) -> list[Block]:
    """The views of `message` at its source or its destination, where `bucket` (uint8) and `tensors` lie.

    Together the blocks hold each element of the message once. Pieces that are `zero_copy`, by their numbers, are on the
    host and skip the bucket: their blocks are checksummed where they lie, and not copied. With `in_bucket` these too
    lie in the bucket and are copied, in blocks of the same bytes. The views stay good as long as the tensors' memory.
    Raises ValueError for a box that leads out of its tensor.
    """
    limit = _HOST_BLOCK_BYTES if bucket.device.type == "cpu" else _DEVICE_BOX_BYTES
    found: list[Block] = []
    for is_zero_copy, group in groupby(enumerate(message.pieces), key=lambda each: each[0] in zero_copy):
        pieces = [piece for _, piece in group]
        if is_zero_copy and not in_bucket:
            found += [_in_place(piece, tensors, end) for piece in pieces]
            continue
        # Bytes that align the next piece are in a checksum within a group alone.
        for together in [[piece] for piece in pieces] if is_zero_copy else [pieces]:
            ranges = list(_ranges(together, bucket, tensors, end, limit))
            runs = _runs(ranges, limit) if bucket.device.type == "cpu" else [ranges]
            found += _blocks(list(runs), bucket)
    return found


def addresses(tensors: Mapping[str, Tensor]) -> list[int]:
    """Where tensors lie: views of messages are good as long as this stays the same."""
    return [tensor.data_ptr() for tensor in tensors.values()]


def pack(message: Sequence[Block], *, with_checksum: bool) -> int | None:
    """Copy this rank's boxes into the bucket, converting them to the destination's types; the checksum if asked for."""
    return _one_after_the_other(gather, message, with_checksum)


def unpack(message: Sequence[Block], *, with_checksum: bool) -> int | None:
    """Copy the boxes out of the bucket into this rank's tensors; the checksum of what was copied, if asked for."""
    return _one_after_the_other(scatter, message, with_checksum)


def differing(message: Sequence[Block], written: Collection[str] = ()) -> Iterator[str]:
    """The names of local tensors in which a byte is not that of the bucket; nothing but the tensors `written` is."""
    for block in message:
        for name, packed, local in zip(block.names, block.packed, block.local, strict=True):
            if name in written:
                local.copy_(packed)
            elif not torch.equal(bytes_of(packed), bytes_of(local)):
                yield name


def _one_after_the_other(
    kernel: Callable[[Block, int | None], int | None], message: Sequence[Block], with_checksum: bool
) -> int | None:
    total = 0 if with_checksum else None
    for block in message:
        total = kernel(block, total)
    return total


@dataclass(frozen=True, slots=True)
class _BucketRange:
    """A part of a bucket: values are copied into it, quantised into it, or are already there."""

    start: int
    stop: int
    name: str = ""
    view: Tensor | None = None
    dtype: torch.dtype | None = None
    quantised: Quantised | None = None

    @property
    def takes_a_pass(self) -> bool:
        """Whether the host makes it in another pass than that of the checksum."""
        if self.quantised is not None:
            return rule_of(self.quantised) is None
        return self.view is not None and self.dtype is not None and not is_known(self.dtype, self.view)


def _ranges(
    pieces: Iterable[Piece], bucket: Tensor, tensors: Mapping[str, Tensor], end: _End, limit: int
) -> Iterator[_BucketRange]:
    """Cut the pieces, in the order of their bytes."""
    for piece in pieces:
        name, box = _place(piece, end)
        _check_inside(name, box, tensors)
        if piece.scales is None or end == "destination":
            yield from _moved(name, tensors[name][box.slices()], piece.offset_bytes, piece.dtype, limit)
        else:
            yield from _quantised(name, tensors[name][box.slices()], piece, piece.scales, bucket, limit)
        if piece.scales is not None and end == "destination":
            name, box, dtype = piece.scales.destination_name, piece.scales.destination_box, _scales_type(piece.scales)
            _check_inside(name, box, tensors)
            yield from _moved(name, tensors[name][box.slices()], piece.scales.offset_bytes, dtype, limit)


def _place(piece: Piece, end: _End) -> tuple[str, Box]:
    return (piece.source_name, piece.source_box) if end == "source" else (piece.destination_name, piece.destination_box)


def _in_place(piece: Piece, tensors: Mapping[str, Tensor], end: _End) -> Block:
    name, box = _place(piece, end)
    _check_inside(name, box, tensors)
    return Block(tensors[name][box.slices()].view(-1).view(torch.uint8), [], [], [])


def _moved(name: str, whole: Tensor, start: int, dtype: torch.dtype, limit: int) -> Iterator[_BucketRange]:
    """The ranges of a local tensor that lies in the bucket in `dtype`, from `start` on."""
    elements = whole.numel() if is_known(dtype, whole) else limit // dtype.itemsize
    for part in parts(tuple(whole.shape), elements):
        stop = start + part.size * dtype.itemsize
        yield _BucketRange(start, stop, name, whole[part.slices()], dtype)
        start = stop


def _quantised(
    name: str, whole: Tensor, piece: Piece, scales: PieceScales, bucket: Tensor, limit: int
) -> Iterator[_BucketRange]:
    """The ranges of the codes, then that of the scales, which are written with the codes."""
    number_format, shape = scales.number_format, piece.source_box.shape
    block = number_format.block_in(shape)
    codes = _packed(bucket, piece.offset_bytes, piece.dtype, shape)
    there = _packed(bucket, scales.offset_bytes, _scales_type(scales), scales.destination_box.shape)
    blocks = max(1, limit // (math.prod(block) * piece.dtype.itemsize), there.shape[1])
    if rule_of(Quantised(name, whole, codes, there, number_format)):
        blocks = there.numel()
    start = piece.offset_bytes
    for part in parts_of_blocks(shape, block, blocks):
        stop = start + part.size * piece.dtype.itemsize
        rows = slice(part.start[0] // block[0], -(-part.stop[0] // block[0]))
        made = Quantised(name, whole[part.slices()], codes[part.slices()], there[rows], number_format)
        yield _BucketRange(start, stop, quantised=made)
        start = stop
    yield _BucketRange(scales.offset_bytes, scales.offset_bytes + scales.size_bytes)


def _scales_type(scales: PieceScales) -> torch.dtype:
    return scales.number_format.scales


def _check_inside(name: str, box: Box, tensors: Mapping[str, Tensor]) -> None:
    if box.intersect(Box.whole(tensors[name].shape)) != box:
        raise ValueError(f"{box} leads out of {name}, which has shape {list(tensors[name].shape)}")


def _packed(bucket: Tensor, start: int, dtype: torch.dtype, shape: Shape) -> Tensor:
    return bucket[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _runs(ranges: Iterable[_BucketRange], limit: int) -> Iterator[list[_BucketRange]]:
    """Neighbours that together reach over `limit` bytes at most, or over any number if one pass is all they take."""
    for takes_a_pass, neighbours in groupby(ranges, key=lambda each: each.takes_a_pass):
        run: list[_BucketRange] = []
        for part in neighbours:
            if run and takes_a_pass and part.stop - run[0].start > limit:
                yield run
                run = []
            run.append(part)
        yield run


def _blocks(runs: Sequence[Sequence[_BucketRange]], bucket: Tensor) -> Iterator[Block]:
    """Blocks that follow each other without gaps, so that the checksum is the same however they are cut."""
    stops = [run[0].start for run in runs[1:]] + [runs[-1][-1].stop]
    for run, stop in zip(runs, stops, strict=True):
        yield _block(run, bucket[run[0].start : stop], bucket)


def _block(run: Sequence[_BucketRange], memory: Tensor, bucket: Tensor) -> Block:
    packed, local, names = [], [], []
    for each in run:
        if each.view is not None and each.dtype is not None:
            packed.append(bucket[each.start : each.stop].view(each.dtype).view(each.view.shape))
            local.append(each.view)
            names.append(each.name)
    return Block(memory, packed, local, names, [each.quantised for each in run if each.quantised])
