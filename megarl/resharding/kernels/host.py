"""Kernels of the host: one pass of machine code, and torch for boxes and number formats that it does not support."""

import torch
from isal import isal_zlib
from torch import Tensor

from megarl.resharding.kernels.block import Block
from megarl.resharding.kernels.compiled_move import Way, move, move_with_checksum, pack_and_quantise
from megarl.resharding.kernels.crc32 import widest_lanes


def gather(block: Block, before: int | None) -> int | None:
    """See `megarl.resharding.kernels.gather`; the checksum is a CRC-32."""
    packed, local = block.conversions
    _copy(packed, local)
    for each in block.in_torch:
        each.quantise()
    if block.rule is None:
        return _move("pack", block, before)
    lanes = widest_lanes() if before is not None else 0
    total, has_codes = pack_and_quantise(block.moves_and_matrices, block.rule, before or 0, lanes)
    if not has_codes:
        # Quantise again in torch, which raises an error that names the tensor and the block.
        for each in block.quantised:
            each.quantise()
    return total if lanes else _checksum(block, before)


def scatter(block: Block, before: int | None) -> int | None:
    """See `megarl.resharding.kernels.scatter`; the checksum is a CRC-32."""
    total = _move("unpack", block, before)
    packed, local = block.conversions
    _copy(local, packed)
    return total


def _move(way: Way, block: Block, before: int | None) -> int | None:
    lanes = widest_lanes()
    if before is not None and lanes:
        return move_with_checksum(way, block.moves, before, lanes)
    move(way, block.moves)
    return _checksum(block, before)


def _checksum(block: Block, before: int | None) -> int | None:
    return None if before is None else isal_zlib.crc32(block.memory.numpy(), before)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
