"""The shape of a number format: codes in blocks, each block with a scale, and what a checkpoint in it looks like."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from converters.architectures import Architecture
from converters.boxes import Box
from converters.layout import Shape

WHOLE_ROW = 2**62
"""Columns of a block that is as wide as its matrix."""
_GLOBAL_SCALE = "_global_scale"


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """A form of weights: a code for each element of some matrices and a scale for each block of it.

    Boxes of codes and the boxes of the scales that belong to them are those of HuggingFace tensors.

    Example: block FP8 has `block=(128, 128)`, a byte for each element and four for each block; rows 128 to 256 of a
    matrix of 512 columns have row 1 of its scales, four of them.
    """

    name: str
    """The format's name in a recipe."""
    title: str
    """The format's name in a sentence."""
    block: tuple[int, int]
    """Rows and columns that share a scale. Blocks at the lower and right edge of a matrix may be smaller.

    `WHOLE_ROW` columns are all that there are."""
    codes: torch.dtype
    elements_per_code: int = 1
    """How many neighbours in a row are in one of `codes`. If more than one, engines take the format through their own
    loader only, which makes it of values."""
    codes_suffix: str = ""
    """The codes of a tensor are called as it, with this at the end."""
    scales: torch.dtype
    scales_suffix: str
    """The scales of a tensor are called as it, with this at the end."""
    global_scale: float | None = None
    """The number by which all scales of all tensors are multiplied, where a checkpoint has one for each tensor."""
    quantised_names: Callable[[Architecture], frozenset[str]]
    """The one place that decides what is in this format; all else stays in high precision."""
    engine_config: Callable[[Architecture], dict[str, Any]]
    """The `quantization_config` by which an engine knows the format and what stays in high precision."""
    quantise_into: Callable[[Tensor, Tensor, Tensor], None]
    """Writes the codes and scales of whole blocks; ValueError for what has none."""
    dequantise_into: Callable[[Tensor, Tensor, Tensor], None]
    """Writes the weights that codes and scales of whole blocks stand for; ValueError for what are no numbers."""
    pack_passes: float | None = None
    """How often as many bytes as codes have pass through a GPU's memory while they are made and checksummed.

    None where engines take the format through their own loader only: `megarl plan` counts no such refit."""
    check: Callable[[Architecture, int, int], None]
    """Raises UserError where an engine that cuts the model, and each expert, over so many ranks cuts through blocks."""

    def is_whole(self, box: Box, shape: Shape) -> bool:
        """Whether a box of a matrix of `shape` consists of whole blocks, so that it can be quantised by itself."""
        return all(
            start % size == 0 and (stop % size == 0 or stop == length)
            for start, stop, size, length in zip(box.start, box.stop, self.block, shape, strict=True)
        )

    def block_in(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of a block in a box of `shape` that consists of whole blocks."""
        rows, columns = map(min, self.block, shape)
        return max(rows, 1), max(columns, 1)

    def scales_box(self, box: Box) -> Box:
        """The box of the scales of all blocks that `box` reaches into."""
        start = tuple(at // size for at, size in zip(box.start, self.block, strict=True))
        return Box(start, tuple(-(-at // size) for at, size in zip(box.stop, self.block, strict=True)))

    def codes_shape(self, shape: Shape) -> Shape:
        """The shape of the codes of a matrix of `shape`."""
        rows, columns = shape
        return rows, columns // self.elements_per_code

    def held_bytes(self, box: Box) -> int:
        """Bytes of the codes of a box and of all scales that they need."""
        scales = self.scales_box(box).size * self.scales.itemsize
        return -(-box.size // self.elements_per_code) * self.codes.itemsize + scales

    def least_bytes(self, box: Box) -> int:
        """Bytes that a box cannot go below, however it is cut: of scales, the share of its elements."""
        scales = box.size * self.scales.itemsize // math.prod(self.block)
        return box.size * self.codes.itemsize // self.elements_per_code + scales

    def scales_name(self, name: str) -> str:
        """The name of the scales of a tensor."""
        return name + self.scales_suffix

    def tensors(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that a checkpoint in this format has in place of a matrix, by their names.

        Raises ValueError as `quantise_into`.
        """
        codes, scales = self.quantise(weight)
        yield name + self.codes_suffix, codes
        yield self.scales_name(name), scales
        if self.global_scale is not None:
            yield name + _GLOBAL_SCALE, torch.tensor([self.global_scale])

    def checkpoint(
        self, architecture: Architecture, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[dict[str, Shape], dict[str, torch.dtype]]:
        """Shapes and types of the tensors of a checkpoint in this format, whose other tensors are of `dtypes`.

        By default these are the types of a model in bfloat16.
        """
        dtypes = architecture.hf_dtypes(torch.bfloat16) if dtypes is None else dtypes
        return self.with_scales(architecture.hf_shapes, dtypes, self.quantised_names(architecture))

    def with_scales(
        self, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], quantised: Collection[str]
    ) -> tuple[dict[str, Shape], dict[str, torch.dtype]]:
        """Shapes and types where the weights `quantised` are codes; the scales of a weight follow it."""
        new_shapes: dict[str, Shape] = {}
        new_dtypes: dict[str, torch.dtype] = {}
        for name, shape in shapes.items():
            if name not in quantised:
                new_shapes[name], new_dtypes[name] = shape, dtypes[name]
                continue
            codes, scales = name + self.codes_suffix, self.scales_name(name)
            new_shapes[codes], new_dtypes[codes] = self.codes_shape(shape), self.codes
            new_shapes[scales], new_dtypes[scales] = self.scales_box(Box.whole(shape)).shape, self.scales
            if self.global_scale is not None:
                new_shapes[name + _GLOBAL_SCALE], new_dtypes[name + _GLOBAL_SCALE] = (1,), torch.float32
        return new_shapes, new_dtypes

    def quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The codes and scales of a whole matrix. Raises ValueError as `quantise_into`."""
        rows, columns = _matrix(weight)
        codes = torch.empty(self.codes_shape((rows, columns)), dtype=self.codes, device=weight.device)
        shape = self.scales_box(Box.whole(weight.shape)).shape
        scales = torch.empty(shape, dtype=self.scales, device=weight.device)
        self.quantise_into(weight, codes, scales)
        return codes, scales

    def dequantise(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights of codes and scales of whole blocks. Raises ValueError as `dequantise_into`."""
        rows, columns = _matrix(codes)
        expected = self.scales_box(Box.whole((rows, columns * self.elements_per_code))).shape
        if tuple(scales.shape) != expected:
            raise ValueError(
                f"codes of {rows} x {columns} have scales of {list(expected)}, and these are {list(scales.shape)}"
            )
        weights = torch.empty(rows, columns * self.elements_per_code, dtype=dtype, device=codes.device)
        self.dequantise_into(codes, scales, weights)
        return weights


def _matrix(tensor: Tensor) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise ValueError(f"only a matrix has blocks, and this tensor has shape {list(tensor.shape)}")
    rows, columns = tensor.shape
    return rows, columns
