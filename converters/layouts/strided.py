"""Finds which box of a tensor a view is, from its place in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from converters.boxes import Box


@dataclass(frozen=True, slots=True)
class Strided:
    """The place of a tensor's elements in its storage; `offset` and `strides` are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Strided":
        """The place of `tensor`."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def box_of(self, view: "Strided") -> Box | None:
        """The box of this tensor that the nonempty `view` holds, in the same order of elements.

        None if it is not a box, has another order (a transposed view), or exceeds this tensor.
        """
        first = view.offset - self.offset
        last = first + sum((length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True))
        start, end = self._index(first), self._index(last)
        if start is None or end is None:
            return None
        box = Box(start, tuple(index + 1 for index in end))
        if min(box.shape, default=1) < 1:
            return None
        is_same = fewest_dimensions(box.shape, self.strides) == fewest_dimensions(view.shape, view.strides)
        return box if is_same else None

    def _index(self, position: int) -> tuple[int, ...] | None:
        """The index of the element `position` elements after the first; None if there is none."""
        index = [0] * len(self.shape)
        for d in sorted(range(len(index)), key=lambda d: -self.strides[d]):
            if self.shape[d] > 1:
                index[d], position = divmod(position, self.strides[d])
                if not 0 <= index[d] < self.shape[d]:
                    return None
        return None if position else tuple(index)


def fewest_dimensions(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(length, stride) of the fewest dimensions that list the same elements in the same order."""
    joined: list[tuple[int, int]] = []
    for length, stride in zip(shape, strides, strict=True):
        if length == 1:
            continue
        if joined and joined[-1][1] == length * stride:
            joined[-1] = (joined[-1][0] * length, stride)
        else:
            joined.append((length, stride))
    return joined
