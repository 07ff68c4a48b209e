"""Kernels of the host: a block is small enough to be in the processor's cache when it is checksummed."""

import torch
from isal import isal_zlib
from torch import Tensor

from megarl.resharding.kernels.block import Block


def gather(block: Block, before: int | None) -> int | None:
    """See `megarl.resharding.kernels.gather`; the checksum is a CRC-32."""
    _copy(block.packed, block.local)
    for each in block.quantised:
        each.quantise()
    return _checksum(block.memory, before)


def scatter(block: Block, before: int | None) -> int | None:
    """See `megarl.resharding.kernels.scatter`; the checksum is a CRC-32."""
    total = _checksum(block.memory, before)
    _copy(block.local, block.packed)
    for each in block.quantised:
        each.dequantise()
    return total


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _checksum(memory: Tensor, before: int | None) -> int | None:
    return None if before is None else isal_zlib.crc32(memory.numpy(), before)
