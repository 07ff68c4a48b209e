"""Kernels of the host, in torch: a block is small enough to be in the processor's cache when it is checksummed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from isal import isal_zlib
from torch import Tensor

from converters.fp8 import dequantise_into, quantise_into
from megarl.resharding.kernels.block import Block
from megarl.resharding.kernels.quantised import Quantised


def gather(block: Block, before: int | None) -> int | None:
    """See `megarl.resharding.kernels.gather`; the checksum is a CRC-32."""
    _copy(block.packed, block.local)
    for each in block.quantised:
        with _named(each):
            quantise_into(each.local, each.codes, each.scales, power_of_two=each.power_of_two)
    return _checksum(block.memory, before)


def scatter(block: Block, before: int | None) -> int | None:
    """See `megarl.resharding.kernels.scatter`; the checksum is a CRC-32."""
    total = _checksum(block.memory, before)
    _copy(block.local, block.packed)
    for each in block.quantised:
        with _named(each):
            dequantise_into(each.codes, each.scales, each.local)
    return total


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


@contextmanager
def _named(quantised: Quantised) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{quantised.name}: {error}") from error


def _checksum(memory: Tensor, before: int | None) -> int | None:
    return None if before is None else isal_zlib.crc32(memory.numpy(), before)
