"""The definition of a number format: codes in blocks, a scale per block, and the form of a checkpoint."""

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
    """A format of weights: for some matrices, a code per element and a scale per block.

    Boxes of codes and of the scales that belong to them are boxes of HuggingFace tensors.

    Example: block FP8 has `block=(128, 128)`, a byte per element and four per block; rows 128 to 256 of a matrix with
    512 columns have row 1 of its scales, four of them.
    """

    name: str
    """The format's name in a recipe."""
    title: str
    """The format's name in a sentence."""
    block: tuple[int, int]
    """Rows and columns that share a scale. Blocks at the lower and right edges of a matrix may be smaller.

    `WHOLE_ROW` columns stand for all columns.
    """
    codes: torch.dtype
    elements_per_code: int = 1
    """Number of adjacent elements of a row in each of `codes`. If more than one, weights are sent as values, and
    engines load the format only through their own loader.
    """
    codes_suffix: str = ""
    """Suffix of the names of codes, after the tensor's name."""
    scales: torch.dtype
    scales_suffix: str
    """Suffix of the names of scales, after the tensor's name."""
    global_scale: float | None = None
    """Factor of all scales of all tensors, for formats whose checkpoints store one per tensor."""
    quantised_names: Callable[[Architecture], frozenset[str]]
    """The names of the matrices in this format, decided nowhere else; all other tensors stay in high precision."""
    engine_config: Callable[[Architecture], dict[str, Any]]
    """The `quantization_config` that tells an engine the format and what stays in high precision."""
    quantise_into: Callable[[Tensor, Tensor, Tensor], None]
    """Writes the codes and scales of whole blocks; raises ValueError for weights that cannot be encoded."""
    dequantise_into: Callable[[Tensor, Tensor, Tensor], None]
    """Writes the weights from codes and scales of whole blocks; raises ValueError for codes or scales that are not
    numbers.
    """
    pack_passes: float | None = None
    """Memory traffic of a GPU that quantises and checksums, in multiples of the size of the codes.

    None if engines load the format only through their own loader; `megarl plan` does not plan such refits.
    """
    check: Callable[[Architecture, int, int], None]
    """Raises UserError if an engine with the given tensor and expert tensor parallel sizes would cut through blocks."""

    def is_whole(self, box: Box, shape: Shape) -> bool:
        """Whether a box of a matrix of `shape` consists of whole blocks, so that it can be quantised on its own."""
        return all(
            start % size == 0 and (stop % size == 0 or stop == length)
            for start, stop, size, length in zip(box.start, box.stop, self.block, shape, strict=True)
        )

    def block_in(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of a block in a box of `shape` that consists of whole blocks."""
        rows, columns = map(min, self.block, shape)
        return max(rows, 1), max(columns, 1)

    def scales_box(self, box: Box) -> Box:
        """The box of the scales of all blocks that `box` overlaps."""
        start = tuple(at // size for at, size in zip(box.start, self.block, strict=True))
        return Box(start, tuple(-(-at // size) for at, size in zip(box.stop, self.block, strict=True)))

    def codes_shape(self, shape: Shape) -> Shape:
        """The shape of the codes of a matrix of `shape`."""
        rows, columns = shape
        return rows, columns // self.elements_per_code

    def held_bytes(self, box: Box) -> int:
        """Bytes of a box's codes and of all scales that they need."""
        scales = self.scales_box(box).size * self.scales.itemsize
        return -(-box.size // self.elements_per_code) * self.codes.itemsize + scales

    def least_bytes(self, box: Box) -> int:
        """Lower bound of a box's bytes, however it is cut: its codes, and its elements' share of the scales."""
        scales = box.size * self.scales.itemsize // math.prod(self.block)
        return box.size * self.codes.itemsize // self.elements_per_code + scales

    def scales_name(self, name: str) -> str:
        """The name of the scales of a tensor."""
        return name + self.scales_suffix

    def tensors(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that replace a matrix in a checkpoint of this format, with their names.

        Raises ValueError as `quantise_into` does.
        """
        codes, scales = self.quantise(weight)
        yield name + self.codes_suffix, codes
        yield self.scales_name(name), scales
        if self.global_scale is not None:
            yield name + _GLOBAL_SCALE, torch.tensor([self.global_scale])

    def checkpoint(
        self, architecture: Architecture, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[dict[str, Shape], dict[str, torch.dtype]]:
        """Shapes and dtypes of the tensors of a checkpoint in this format, whose other tensors have `dtypes`.

        By default, these are the dtypes of a bfloat16 model.
        """
        dtypes = architecture.hf_dtypes(torch.bfloat16) if dtypes is None else dtypes
        return self.with_scales(architecture.hf_shapes, dtypes, self.quantised_names(architecture))

    def with_scales(
        self, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], quantised: Collection[str]
    ) -> tuple[dict[str, Shape], dict[str, torch.dtype]]:
        """Shapes and dtypes if the weights `quantised` are codes; the scales of a weight follow it."""
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
        """The codes and scales of a whole matrix. Raises ValueError as `quantise_into` does."""
        rows, columns = _matrix(weight)
        codes = torch.empty(self.codes_shape((rows, columns)), dtype=self.codes, device=weight.device)
        shape = self.scales_box(Box.whole(weight.shape)).shape
        scales = torch.empty(shape, dtype=self.scales, device=weight.device)
        self.quantise_into(weight, codes, scales)
        return codes, scales

    def dequantise(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights for codes and scales of whole blocks. Raises ValueError as `dequantise_into` does."""
        rows, columns = _matrix(codes)
        expected = self.scales_box(Box.whole((rows, columns * self.elements_per_code))).shape
        if tuple(scales.shape) != expected:
            raise ValueError(
                f"codes of {rows} x {columns} have scales of {list(expected)}, and these are {list(scales.shape)}"
            )
        weights = torch.empty(rows, columns * self.elements_per_code, dtype=dtype, device=codes.device)
        # Rehearsed engines derive weights from codes without values.
        if not codes.is_meta:
            self.dequantise_into(codes, scales, weights)
        return weights


def _matrix(tensor: Tensor) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise ValueError(f"only a matrix has blocks, and this tensor has shape {list(tensor.shape)}")
    rows, columns = tensor.shape
    return rows, columns
