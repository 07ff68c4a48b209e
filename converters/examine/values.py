"""Measures how a tensor's values differ between two checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from converters.boxes import Box
from converters.examine.weights import Weights, blocks

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ValueDifference:
    """How a tensor differs. NaNs are equal (if the dtypes are, only with the same bits); 0 equals -0."""

    name: str
    elements: int
    """Number of differing elements, out of `of`."""
    of: int
    first: tuple[int, ...]
    """Index of the first differing element."""
    largest: float
    """Largest absolute difference of two finite values."""
    largest_relative: float
    """Largest difference of two finite values, relative to the larger magnitude."""
    not_finite: int
    """Number of differing elements that are NaN or infinite on at least one side."""
    is_rounding: bool
    """Whether the values are equal after rounding both to the narrower dtype, which must be a floating-point one."""


def compare_values(
    name: str, first: tuple[Weights, str], second: tuple[Weights, str], on_bytes: Callable[[int], None]
) -> ValueDifference | None:
    """Compare two tensors of the same shape, a few MB at a time; None if they are equal.

    `on_bytes` is called with the size of each compared block, in the first tensor's dtype.
    """
    (weights_a, name_a), (weights_b, name_b) = first, second
    shape = weights_a.shapes[name_a]
    found = _Found()
    for box in blocks(shape):
        a, b = weights_a.read(name_a, box), weights_b.read(name_b, box)
        if not _same_bits(a, b):
            found.add(a, b, box)
        on_bytes(a.nbytes)
    return found.result(name, Box.whole(shape).size) if found.elements else None


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(_BITS[values.itemsize])


class _Found:
    """The differences found so far in a tensor's blocks."""

    def __init__(self) -> None:
        self.elements, self._not_finite = 0, 0
        self._first: tuple[int, ...] = ()
        self._largest, self._largest_relative = 0.0, 0.0
        self._is_rounding = True

    def add(self, a: torch.Tensor, b: torch.Tensor, box: Box) -> None:
        """Add a block that is not bitwise equal."""
        different = _different(a, b)
        number = int(different.sum())
        if not number:
            return
        if not self.elements:
            inside = torch.nonzero(different)[0].tolist()
            self._first = tuple(start + index for start, index in zip(box.start, inside, strict=True))
        self.elements += number
        a, b = a[different], b[different]
        self._is_rounding = self._is_rounding and _equal_once_rounded(a, b)
        wide_a, wide_b = a.double(), b.double()
        gaps = (wide_a - wide_b).abs()
        finite = gaps.isfinite()
        self._not_finite += number - int(finite.sum())
        if finite.any():
            magnitudes = torch.maximum(wide_a.abs(), wide_b.abs())
            self._largest = max(self._largest, gaps[finite].max().item())
            self._largest_relative = max(self._largest_relative, (gaps / magnitudes)[finite].max().item())

    def result(self, name: str, size: int) -> ValueDifference:
        return ValueDifference(
            name,
            self.elements,
            size,
            self._first,
            self._largest,
            self._largest_relative,
            self._not_finite,
            self._is_rounding,
        )


def _different(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype is b.dtype:
        return (a != b) & (_bits(a) != _bits(b))
    return (a.double() != b.double()) & ~(a.isnan() & b.isnan())


def _equal_once_rounded(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.itemsize == b.itemsize:
        return False
    narrow = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    # Converting to integers does not count as rounding: all weights below 1 would become 0.
    return narrow.is_floating_point and not _different(a.to(narrow), b.to(narrow)).any()
