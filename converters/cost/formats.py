"""Formats: how many bytes of a tensor travel, and how many a destination holds."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from converters.architectures import Architecture
from converters.boxes import Box
from converters.fp8 import BLOCK, quantised_names
from converters.layout import Shape

_SCALE_BYTES = 4


@dataclass(frozen=True)
class TensorFormat:
    """The form in which the destination holds an HF tensor of `shape`: in a type of `element_bytes`, or in block FP8.

    A block of FP8 is quantised where its values are, before they travel, unless a cut goes through it: of a piece that
    is not made of whole blocks the values travel, with `element_bytes` each, and the destination quantises.
    """

    shape: Shape
    element_bytes: int
    block_fp8: bool = False

    def travelling(self, piece: Box) -> int:
        """Bytes of a piece on its way."""
        whole = self.block_fp8 and all(
            start % BLOCK == 0 and (stop % BLOCK == 0 or stop == length)
            for start, stop, length in zip(piece.start, piece.stop, self.shape, strict=True)
        )
        return self.held(piece) if whole else piece.size * self.element_bytes

    def held(self, box: Box) -> int:
        """Bytes of a box where it stays: with a scale, in FP8, for every block that it reaches into."""
        if not self.block_fp8:
            return box.size * self.element_bytes
        blocks = 1
        for start, stop in zip(box.start, box.stop, strict=True):
            blocks *= -(-stop // BLOCK) - start // BLOCK
        return box.size + blocks * _SCALE_BYTES

    def least(self, box: Box) -> int:
        """Bytes that a box cannot go below, however it is cut: of a scale, in FP8, the share of the elements."""
        if not self.block_fp8:
            return box.size * self.element_bytes
        return box.size + box.size * _SCALE_BYTES // BLOCK**2


def formats(
    architecture: Architecture, *, block_fp8: bool, dtype: torch.dtype = torch.bfloat16
) -> dict[str, TensorFormat]:
    """HF name -> format in an engine: `dtype`, but for what stays in float32, and `block_fp8` for the matrices that
    are released in it (`converters.fp8.quantised_names`).
    """
    dtypes: Mapping[str, torch.dtype] = architecture.hf_dtypes(dtype)
    quantised = quantised_names(architecture) if block_fp8 else frozenset()
    return {
        name: TensorFormat(shape, dtypes[name].itemsize, name in quantised)
        for name, shape in architecture.hf_shapes.items()
    }
