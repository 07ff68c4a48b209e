"""First launches: kernels move a few bytes before the first refit, so that they are compiled and loaded by then.

This is done by one thread: if two launch a Triton kernel for the first time at once, the second may find it half loaded
and fail. It also keeps the first refit from waiting for compilers while engines are fenced.
"""

import math

import torch

from converters.boxes import Box
from converters.fp8 import BLOCK
from converters.number_formats import NumberFormat
from megarl.resharding.alignment import aligned
from megarl.resharding.kernels import Block, Quantised, gather, scatter
from megatron_ext import device

_SHAPE = BLOCK, BLOCK


def launch_scatter(*, with_checksum: bool) -> None:
    """Launch the kernel that unpacks a bucket."""
    scatter(_copied(), 0 if with_checksum else None)


def launch_gather(made: tuple[NumberFormat, torch.dtype] | None, *, with_checksum: bool) -> None:
    """Launch the kernel that packs a bucket; `made` is the number format to quantise to, and the values' dtype."""
    gather(_copied() if made is None else _quantised(*made), 0 if with_checksum else None)


def _copied() -> Block:
    memory, local = (torch.zeros(BLOCK, dtype=torch.uint8, device=device.device()) for _ in range(2))
    return Block(memory, [memory], [local], ["first launch"])


def _quantised(number_format: NumberFormat, dtype: torch.dtype) -> Block:
    scales_shape = number_format.scales_box(Box.whole(_SHAPE)).shape
    start = aligned(math.prod(_SHAPE) * number_format.codes.itemsize)
    stop = start + math.prod(scales_shape) * number_format.scales.itemsize
    memory = torch.zeros(aligned(stop), dtype=torch.uint8, device=device.device())
    local = torch.zeros(_SHAPE, dtype=dtype, device=device.device())
    codes = memory[: math.prod(_SHAPE) * number_format.codes.itemsize].view(number_format.codes).view(_SHAPE)
    scales = memory[start:stop].view(number_format.scales).view(scales_shape)
    return Block(memory, [], [], [], [Quantised("first launch", local, codes, scales, number_format)])
