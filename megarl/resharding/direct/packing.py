"""Packs a message into a bucket and unpacks it: views are built once, and copied by the kernels in every refit."""

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

# A block of this size is still in the CPU cache when it is checksummed.
_HOST_BLOCK_BYTES = 2**20
# GPU kernels index the elements of a box with 32 bits.
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
    """Build the views of `message` into `bucket` (uint8) and `tensors`, for its source or its destination.

    Together the blocks hold each element of the message once. Pieces whose numbers are in `zero_copy` are on the host
    and skip the bucket: their blocks are checksummed in place and not copied. With `in_bucket` they are in the bucket
    after all and are copied, in blocks of the same bytes. The views are valid as long as the tensors' memory stays
    where it is. Raises ValueError for a box that exceeds its tensor.
    """
    limit = _HOST_BLOCK_BYTES if bucket.device.type == "cpu" else _DEVICE_BOX_BYTES
    found: list[Block] = []
    for is_zero_copy, group in groupby(enumerate(message.pieces), key=lambda each: each[0] in zero_copy):
        pieces = [piece for _, piece in group]
        if is_zero_copy and not in_bucket:
            found += [_in_place(piece, tensors, end) for piece in pieces]
            continue
        # Alignment padding between pieces is part of the checksum only within a group.
        for together in [[piece] for piece in pieces] if is_zero_copy else [pieces]:
            ranges = list(_ranges(together, bucket, tensors, end, limit))
            runs = _runs(ranges, limit) if bucket.device.type == "cpu" else [ranges]
            found += _blocks(list(runs), bucket)
    return found


def addresses(tensors: Mapping[str, Tensor]) -> list[int]:
    """The addresses of tensors: views of messages are valid as long as these do not change."""
    return [tensor.data_ptr() for tensor in tensors.values()]


def pack(message: Sequence[Block], *, with_checksum: bool) -> int | None:
    """Copy this rank's boxes into the bucket, in the destination's dtypes. Returns the checksum, if asked for."""
    return _one_after_the_other(gather, message, with_checksum)


def unpack(message: Sequence[Block], *, with_checksum: bool) -> int | None:
    """Copy the boxes from the bucket into this rank's tensors. Returns their checksum, if asked for."""
    return _one_after_the_other(scatter, message, with_checksum)


def differing(message: Sequence[Block], written: Collection[str] = ()) -> Iterator[str]:
    """Yield the names of local tensors that differ from the bucket in a byte; those in `written` are copied instead."""
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
    """A range of a bucket whose bytes are copied, quantised, or already there."""

    start: int
    stop: int
    name: str = ""
    view: Tensor | None = None
    dtype: torch.dtype | None = None
    quantised: Quantised | None = None

    @property
    def takes_a_pass(self) -> bool:
        """Whether the host needs a pass of its own for it, besides that of the checksum."""
        if self.quantised is not None:
            return rule_of(self.quantised) is None
        return self.view is not None and self.dtype is not None and not is_known(self.dtype, self.view)


def _ranges(
    pieces: Iterable[Piece], bucket: Tensor, tensors: Mapping[str, Tensor], end: _End, limit: int
) -> Iterator[_BucketRange]:
    """Cut the pieces into ranges, in the order of their bytes."""
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
    """The ranges of a local tensor whose copy in the bucket has `dtype` and begins at `start`."""
    elements = whole.numel() if is_known(dtype, whole) else limit // dtype.itemsize
    for part in parts(tuple(whole.shape), elements):
        stop = start + part.size * dtype.itemsize
        yield _BucketRange(start, stop, name, whole[part.slices()], dtype)
        start = stop


def _quantised(
    name: str, whole: Tensor, piece: Piece, scales: PieceScales, bucket: Tensor, limit: int
) -> Iterator[_BucketRange]:
    """The ranges of the codes, then the range of the scales, which the kernel writes together with the codes."""
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
    """Group neighbouring ranges: up to `limit` bytes if they need a pass of their own, else without a limit."""
    for takes_a_pass, neighbours in groupby(ranges, key=lambda each: each.takes_a_pass):
        run: list[_BucketRange] = []
        for part in neighbours:
            if run and takes_a_pass and part.stop - run[0].start > limit:
                yield run
                run = []
            run.append(part)
        yield run


def _blocks(runs: Sequence[Sequence[_BucketRange]], bucket: Tensor) -> Iterator[Block]:
    """Yield blocks that follow each other without gaps, so that the checksum does not depend on how they are cut."""
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
