"""Output of a conversion: tensors, each at one place in a file and assembled from boxes of source tensors."""

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
    """`source_box` of a tensor of the source goes, element for element, into `box` of the target."""

    source: str
    source_box: Box
    box: Box


@dataclass(frozen=True, slots=True)
class Place:
    """From byte `offset` of a file on. `file` is relative to the output folder."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor to be written. Elements that no part fills become 0."""

    name: str
    place: Place
    dtype: torch.dtype
    shape: Shape
    parts: Sequence[Part]
    framed_shape: Shape | None = None
    """With what shape torch.save frames it; None for bare elements."""
    scales: Place | None = None
    """Where the fp32 scales of its 128x128 blocks go; the elements are then FP8 codes."""

    @property
    def nbytes(self) -> int:
        """Size of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Written:
    """Where the elements of a tensor are, and their CRC-32."""

    file: str
    offset: int
    nbytes: int
    crc32: int

    def as_list(self) -> list[Any]:
        """The fields, for JSON."""
        return [self.file, self.offset, self.nbytes, self.crc32]

    @classmethod
    def from_list(cls, fields: Sequence[Any]) -> "Written":
        """The reverse of `as_list`. Raises ValueError where no folder can have that, and TypeError for no sequence."""
        file, *numbers = fields
        if not isinstance(file, str) or len(numbers) != 3 or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise ValueError(f"a tensor or file has the place {fields}")
        relative = PurePosixPath(file)
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"{file} leads out of the folder")
        return cls(file, *numbers)
