"""Blocks for kernels: boxes of any strides, and numbers of every kind."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from converters.boxes import Box as Region
from converters.fp8 import LARGEST_WEIGHT
from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0, INT8_CHANNEL, MXFP8, NumberFormat
from megarl.resharding.kernels import Block, Quantised

ALIGNMENT = 64
TYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float16, torch.int64)
NUMBERS = (0.0, -0.0, 1e-45, -1e-40, 1e-12, 0.3, -1.0, 447.0, 449.0, -1e6, LARGEST_WEIGHT)


NOT_HELD = (torch.nan, torch.inf, -torch.inf, 1.01 * LARGEST_WEIGHT, -torch.finfo(torch.float32).max)
"""Weights that FP8 cannot hold, whatever the scale."""


@dataclass(frozen=True)
class Box:
    """Every `step`-th column of a box of `shape` that begins in row and column `start` of a tensor."""

    shape: tuple[int, ...]
    local: torch.dtype
    packed: torch.dtype
    start: int
    step: int
    turned: bool


@dataclass(frozen=True)
class Matrix:
    """A matrix to be quantised, that begins `start` elements after the start of each row of a tensor."""

    shape: tuple[int, int]
    dtype: torch.dtype
    start: int
    number_format: NumberFormat
    scale: float


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    plane = draw(st.lists(st.integers(1, 40), max_size=2))
    # Turned, each index of the first dimension may be a plane of its own.
    shape = (*draw(st.lists(st.integers(1, 3), max_size=len(plane) // 2)), *plane)
    local = draw(st.sampled_from(TYPES))
    wider = draw(st.booleans()) and local is torch.bfloat16
    return Box(
        shape,
        local,
        torch.float32 if wider else local,
        draw(st.sampled_from((0, 1, 4, 8))),
        draw(st.sampled_from((1, 1, 1, 2))),
        draw(st.booleans()),
    )


def matrices_in(formats: Sequence[NumberFormat], columns: Sequence[int]) -> st.SearchStrategy[Matrix]:
    return st.builds(
        Matrix,
        st.tuples(st.sampled_from((1, 100, 128, 130)), st.sampled_from(columns)),
        st.sampled_from((torch.bfloat16, torch.float32)),
        st.sampled_from((0, 1, 8)),
        st.sampled_from(formats),
        st.sampled_from((0.0, 1e-42, 1e-9, 0.02, 300.0, 1e30)),
    )


in_block_fp8 = matrices_in((FP8_BLOCK, FP8_BLOCK_UE8M0), (3, 128, 136))
in_mxfp8 = matrices_in((MXFP8,), (32, 128, 160))
in_int8 = matrices_in((INT8_CHANNEL,), (3, 128, 136))

places = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)), min_size=1, max_size=3
)
"""Places in any matrix, as shares of its rows and columns."""


def put(tensor: Tensor, where: Sequence[tuple[float, float]], values: Sequence[float]) -> None:
    """Write values to places of a matrix."""
    for (row, column), value in zip(where, values, strict=False):
        tensor[int(row * tensor.shape[0]), int(column * tensor.shape[1])] = value


def block(
    copied: Sequence[Box], quantised: Sequence[Matrix], seed: int = 0, device: str = "cpu", padding: int = 0
) -> Block:
    """A block whose local tensors have random bits, or numbers that formats hold; gaps of its memory are `padding`."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [aligned(torch.Size(box.shape).numel() * box.packed.itemsize) for box in copied]
    for matrix in quantised:
        scales = torch.Size(scales_shape(matrix)).numel() * matrix.number_format.scales.itemsize
        sizes += [aligned(matrix.shape[0] * matrix.shape[1]), aligned(scales)]
    memory = torch.full((sum(sizes),), padding, dtype=torch.uint8, device=device)
    pieces = iter(memory.split(sizes))
    packed = [view(next(pieces), box.packed, box.shape) for box in copied]
    local = [local_view(box, generator, device) for box in copied]
    done = [
        Quantised(
            f"matrix {number}",
            numbers(matrix, generator, device),
            view(next(pieces), matrix.number_format.codes, matrix.shape),
            view(next(pieces), matrix.number_format.scales, scales_shape(matrix)),
            matrix.number_format,
        )
        for number, matrix in enumerate(quantised)
    ]
    return Block(memory, packed, local, [f"box {number}" for number in range(len(copied))], done)


def scales_shape(matrix: Matrix) -> tuple[int, ...]:
    return matrix.number_format.scales_box(Region.whole(matrix.shape)).shape


def elsewhere(source: Block) -> Block:
    """The same bucket, to be unpacked into new tensors of the same strides, full of something else; codes stay."""
    made = [part for each in source.quantised for part in (each.codes, each.scales)]
    local = [*map(other, source.local), *map(torch.zeros_like, made)]
    return replace(source, packed=[*source.packed, *made], local=local, names=["unpacked"] * len(local), quantised=())


def in_all(found: Block) -> Iterator[Tensor]:
    """The bits of all local tensors, and of what surrounds them."""
    for tensor in (*found.local, *(each.local for each in found.quantised)):
        yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).cpu()


def counted(found: Block) -> Tensor:
    """The memory of a block with zeros between its boxes."""
    memory = torch.zeros_like(found.memory)
    for piece in (*found.packed, *(part for each in found.quantised for part in (each.codes, each.scales))):
        start, size = piece.data_ptr() - found.memory.data_ptr(), piece.numel() * piece.element_size()
        memory[start : start + size] = found.memory[start : start + size]
    return memory


def weighted_sum(found: Block, before: int) -> int:
    """The checksum of a GPU by its formula, in whole numbers."""
    words = counted(found).cpu().view(torch.int32).tolist()
    return (before * 6364136223846793005 + sum(word * at for at, word in enumerate(words, 1))) % 2**64


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def view(memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return memory[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


def other(tensor: Tensor) -> Tensor:
    """A tensor with the same place in a storage of the same size, whose bytes are all 7."""
    storage = torch.full((tensor.untyped_storage().nbytes(),), 7, dtype=torch.uint8, device=tensor.device)
    return storage.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def local_view(box: Box, generator: torch.Generator, device: str) -> Tensor:
    shape = (*(size + box.start for size in box.shape[:-1]), *(size * box.step + box.start for size in box.shape[-1:]))
    size = torch.Size(shape).numel() * box.local.itemsize
    raw = torch.randint(256, (size,), dtype=torch.uint8, generator=generator).view(box.local).view(shape).to(device)
    if box.packed is not box.local:
        # Devices choose the bits of a converted NaN.
        raw.nan_to_num_()
    if box.turned and raw.dim() > 1:
        raw = raw.transpose(0, -1).contiguous().transpose(0, -1)
    index = [slice(box.start, None) for _ in box.shape]
    return raw[(*index[:-1], slice(box.start, None, box.step))] if box.shape else raw


def numbers(matrix: Matrix, generator: torch.Generator, device: str) -> Tensor:
    rows, columns = matrix.shape
    values = torch.randn(rows, columns + matrix.start, generator=generator) * matrix.scale
    special = torch.tensor(NUMBERS)
    where = torch.rand(values.shape, generator=generator) < 0.01
    values[where] = special[torch.randint(len(special), (int(where.sum()),), generator=generator)]
    if matrix.number_format is INT8_CHANNEL:
        values.clamp_(-(2.0**127), 2.0**127)
    return values.to(matrix.dtype).to(device)[:, matrix.start :]
