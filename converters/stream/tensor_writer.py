"""Writes one tensor.

Bytes that the source's mapped file holds as they are to be written are written directly from it. All others are
gathered, converted or quantised in a buffer.
"""

import math
from collections.abc import Callable, Iterator

import torch
from isal.isal_zlib import crc32

from converters.boxes import Box
from converters.errors import UserError
from converters.formats.torch_dist.framing import frame
from converters.fp8 import BLOCK, Scratch, quantise_into, scales_shape
from converters.layout import Shape
from converters.stream.files import OutputFiles
from converters.stream.sources import Source
from converters.stream.targets import Part, Place, Target, Written

# Fits into a processor's second-level cache, where it stays between the checksum and the write.
_SLICE_BYTES = 2**20
# Bytes to decode, convert or quantise at once: enough that threads do not contend for the GIL.
_GATHERED_BYTES = 2**21
_SCALE_DTYPE = torch.float32


def places_of(target: Target) -> list[tuple[str, int, int]]:
    """File, offset and size of a target's elements, and of its scales if it has any."""
    head = frame(target.dtype, target.framed_shape).head_bytes if target.framed_shape is not None else 0
    places = [(target.place.file, target.place.offset + head, target.nbytes)]
    if target.scales:
        nbytes = math.prod(scales_shape(target.shape)) * _SCALE_DTYPE.itemsize
        places.append((target.scales.file, target.scales.offset, nbytes))
    return places


class TensorWriter:
    """Writes tensors one after the other. Each thread has its own.

    `on_bytes` is called with the size of each slice after it is written; an exception that it raises ends the work.
    """

    def __init__(self, source: Source, files: OutputFiles, on_bytes: Callable[[int], None]) -> None:
        self._source, self._files, self._on_bytes = source, files, on_bytes
        self._memory, self._codes = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
        self._scratch = Scratch()

    def write(self, target: Target) -> list[Written]:
        """Write a tensor, its frame and its scales; return the places of the elements and scales, with checksums."""
        if target.scales:
            return self._write_fp8(target, target.scales)
        ((file, start, _),) = places_of(target)
        written = self._write_slices(Place(file, start), self._slices(target))
        self.write_frame(target, written.crc32)
        return [written]

    def write_frame(self, target: Target, checksum: int) -> None:
        """Write the frame around the elements, which have this CRC-32; bare elements have none."""
        if target.framed_shape is None:
            return
        around = frame(target.dtype, target.framed_shape)
        head, tail = around.around(checksum)
        self._files.write(target.place.file, memoryview(head), target.place.offset)
        self._files.write(target.place.file, memoryview(tail), target.place.offset + around.length - len(tail))

    def _write_slices(self, place: Place, slices: Iterator[torch.Tensor]) -> Written:
        """Write contiguous tensors one after the other."""
        position, checksum = place.offset, 0
        for each in slices:
            raw = _bytes(each)
            for start in range(0, len(raw), _SLICE_BYTES):
                piece = raw[start : start + _SLICE_BYTES]
                checksum = crc32(piece, checksum)
                self._files.write(place.file, piece, position)
                position += len(piece)
                self._on_bytes(len(piece))
        return Written(place.file, place.offset, position - place.offset, checksum)

    def _slices(self, target: Target) -> Iterator[torch.Tensor]:
        """Yield the elements of a target, in order."""
        row = 0
        for part in _in_row_order(target):
            start, stop = part.box.start[0], part.box.stop[0]
            yield from self._gathered(target, row, start, target.dtype)
            view = self._source.view(part.source, part.source_box)
            if view is not None and view.dtype == target.dtype and view.is_contiguous():
                yield view
            else:
                yield from self._gathered(target, start, stop, target.dtype)
            row = stop
        yield from self._gathered(target, row, target.shape[0], target.dtype)

    def _gathered(self, target: Target, start: int, stop: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield rows `start` to `stop` of a target in `dtype`, gathered in the buffer a few at a time."""
        for first, last in _row_ranges(target.shape, start, stop, dtype):
            block = Box((first, *(0 for _ in target.shape[1:])), (last, *target.shape[1:]))
            yield self._gather(target, block, dtype)

    def _gather(self, target: Target, block: Box, dtype: torch.dtype) -> torch.Tensor:
        nbytes = block.size * dtype.itemsize
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        buffer = self._memory[:nbytes].view(dtype).view(block.shape)
        overlaps = [(part, piece) for part in target.parts if (piece := part.box.intersect(block))]
        filled = sum(piece.size for _, piece in overlaps)
        if filled < block.size:
            buffer.zero_()
        for part, piece in overlaps:
            source_box = piece.relative_to(part.box).shift(part.source_box.start)
            self._source.copy_into(buffer[piece.relative_to(block).slices()], part.source, source_box)
        return buffer

    def _write_fp8(self, target: Target, place: Place) -> list[Written]:
        scales = torch.empty(scales_shape(target.shape), dtype=_SCALE_DTYPE)

        def codes() -> Iterator[torch.Tensor]:
            first = 0
            for block in self._rows_of_blocks(target):
                rows = -(-block.shape[0] // BLOCK)
                if self._codes.numel() < block.numel():
                    self._codes = torch.empty(block.numel(), dtype=torch.uint8)
                quantised = self._codes[: block.numel()].view(target.dtype).view(block.shape)
                try:
                    quantise_into(block, quantised, scales[first : first + rows], scratch=self._scratch)
                except ValueError as error:
                    raise UserError(f"{target.name} cannot be written in FP8: {error}; export it without") from error
                first += rows
                yield quantised

        written = self._write_slices(target.place, codes())
        return [written, self._write_slices(place, iter([scales]))]

    def _rows_of_blocks(self, target: Target) -> Iterator[torch.Tensor]:
        """Yield the values of a matrix in the source's dtype, some rows of FP8 blocks at a time."""
        part, dtype = target.parts[0], self._source.dtype(target.parts[0].source)
        view = self._source.view(part.source, part.source_box) if part.box == Box.whole(target.shape) else None
        if view is None:
            yield from self._gathered(target, 0, target.shape[0], dtype)
            return
        for first, last in _row_ranges(target.shape, 0, target.shape[0], dtype):
            yield view[first:last]


def _row_ranges(shape: Shape, start: int, stop: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Cut rows `start` to `stop` into ranges that, except for the last, are whole rows of FP8 blocks in matrices."""
    multiple = BLOCK if len(shape) == 2 else 1
    row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
    rows = max(multiple, _GATHERED_BYTES // row_bytes // multiple * multiple)
    for first in range(start, stop, rows):
        yield first, min(first + rows, stop)


def _in_row_order(target: Target) -> list[Part]:
    """The parts of a target in row order; empty unless all of them cover whole rows."""
    ends = (0,) * (len(target.shape) - 1), tuple(target.shape[1:])
    if any((part.box.start[1:], part.box.stop[1:]) != ends for part in target.parts):
        return []
    return sorted(target.parts, key=lambda part: part.box.start)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
