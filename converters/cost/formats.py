"""Formats: how many bytes of a tensor are sent, and how many a destination holds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from converters.architectures import Architecture
from converters.boxes import Box
from converters.layout import Shape
from converters.number_formats import NumberFormat


@dataclass(frozen=True)
class TensorFormat:
    """The form in which the destination holds an HF tensor of `shape`: in a dtype of `element_bytes`, or quantised.

    A block is quantised at its source unless it is split: a piece that does not consist of whole blocks is sent as
    values, of `element_bytes` each, and quantised by the destination.
    """

    shape: Shape
    element_bytes: int
    number_format: NumberFormat | None = None

    def travelling(self, piece: Box) -> int:
        """Bytes sent for a piece."""
        return self.held(piece) if self._is_whole(piece) else piece.size * self.element_bytes

    def staged(self, box: Box, pieces: Iterable[Box]) -> int:
        """Bytes of the values that a destination stages for a box that comes in `pieces`: all, if a block is split."""
        is_split = self.number_format is not None and not all(map(self._is_whole, pieces))
        return box.size * self.element_bytes if is_split else 0

    def held(self, box: Box) -> int:
        """Bytes of a box at the destination, including a scale for every block that it touches, if quantised."""
        return self.number_format.held_bytes(box) if self.number_format else box.size * self.element_bytes

    def least(self, box: Box) -> int:
        """Lower bound of a box's bytes, however it is split."""
        return self.number_format.least_bytes(box) if self.number_format else box.size * self.element_bytes

    def _is_whole(self, piece: Box) -> bool:
        """Whether a piece is quantised at its source."""
        return self.number_format is not None and self.number_format.is_whole(piece, self.shape)


def formats(
    architecture: Architecture, *, number_format: NumberFormat | None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, TensorFormat]:
    """HF name -> format in an engine: `dtype`, except for what stays in float32 and what `number_format` quantises."""
    dtypes: Mapping[str, torch.dtype] = architecture.hf_dtypes(dtype)
    quantised = number_format.quantised_names(architecture) if number_format else frozenset()
    return {
        name: TensorFormat(shape, dtypes[name].itemsize, number_format if name in quantised else None)
        for name, shape in architecture.hf_shapes.items()
    }
