"""Targets of a conversion: tensors, each at one place in a file and assembled from boxes of source tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import torch

from converters.boxes import Box
from converters.layout import Shape


@dataclass(frozen=True, slots=True)
class Part:
    """`source_box` of a source tensor is copied, element for element, into `box` of the target."""

    source: str
    source_box: Box
    box: Box


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a file, from byte `offset` on. `file` is relative to the output folder."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor to write. Elements that no part fills become 0."""

    name: str
    place: Place
    dtype: torch.dtype
    shape: Shape
    parts: Sequence[Part]
    framed_shape: Shape | None = None
    """The shape with which torch.save frames the elements; None for bare elements."""
    scales: Place | None = None
    """Place of the fp32 scales of its 128x128 blocks; if given, the elements are FP8 codes."""

    @property
    def nbytes(self) -> int:
        """Size of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Written:
    """The place of a tensor's elements, and their CRC-32."""

    file: str
    offset: int
    nbytes: int
    crc32: int

    def as_list(self) -> list[Any]:
        """The fields, for JSON."""
        return [self.file, self.offset, self.nbytes, self.crc32]

    @classmethod
    def from_list(cls, fields: Sequence[Any]) -> "Written":
        """The inverse of `as_list`. Raises ValueError for values that no folder can have, TypeError for no sequence."""
        file, *numbers = fields
        if not isinstance(file, str) or len(numbers) != 3 or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise ValueError(f"a tensor or file has the place {fields}")
        relative = PurePosixPath(file)
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"{file} leads out of the folder")
        return cls(file, *numbers)
