"""Boxes: half-open hyper-rectangles of tensor elements."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, lt, sub


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """The elements `start[d] <= index[d] < stop[d]` of a tensor, in every dimension `d`.

    A box of a tensor without dimensions has empty `start` and `stop` and one element.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """The box of all elements of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Length in every dimension."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """The index expression of this box in its tensor."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """The elements in both boxes; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(lt, start, stop)) else None

    def shift(self, offset: Sequence[int]) -> "Box":
        """The same box, moved by `offset`."""
        return Box(tuple(map(add, self.start, offset)), tuple(map(add, self.stop, offset)))

    def relative_to(self, origin: "Box") -> "Box":
        """This box in the coordinates of a tensor that consists of just `origin`."""
        return Box(tuple(map(sub, self.start, origin.start)), tuple(map(sub, self.stop, origin.start)))

    def subtract(self, inner: "Box") -> "Iterator[Box]":
        """Cut this box without `inner`, which must be inside it, into disjoint boxes."""
        start, stop = list(self.start), list(self.stop)
        for d in range(len(start)):
            for a, b in ((start[d], inner.start[d]), (inner.stop[d], stop[d])):
                if a < b:
                    yield Box((*start[:d], a, *start[d + 1 :]), (*stop[:d], b, *stop[d + 1 :]))
            start[d], stop[d] = inner.start[d], inner.stop[d]

    def without(self, other: "Box") -> "list[Box]":
        """Cut this box without the elements of `other` into disjoint boxes."""
        common = self.intersect(other)
        return [self] if common is None else list(self.subtract(common))


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Find two boxes of one tensor that share an element; None if all are disjoint."""
    active: list[Box] = []
    for box in sorted(boxes):
        if box.start:
            active = [other for other in active if other.stop[0] > box.start[0]]
        for other in active:
            if box.intersect(other):
                return other, box
        active.append(box)
    return None


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements `start` to `stop` of a contiguous tensor, in order.

    Each box is contiguous, too. There are at most two per dimension except the last, plus one.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the rows that are whole
    if first > last:
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last, *shape[1:]))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((row, *box.start), (row + 1, *box.stop))
