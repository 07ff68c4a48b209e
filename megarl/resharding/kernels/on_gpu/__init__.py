"""Kernels of a GPU: one Triton launch moves a whole block.

The checksum is the sum modulo 2^64 of all 32-bit words of the boxes, each times its position in the block's memory. A
changed word, two swapped words and reordered boxes all change the sum, and programs may add their parts in any order.
Padding between boxes is not counted.
"""

from collections.abc import Mapping

import torch

from megarl.resharding.kernels.block import Block
from megarl.resharding.kernels.launch_table import CodeFormat
from megarl.resharding.kernels.on_gpu.move import SUMS, move
from megatron_ext import device

_LAUNCHES: Mapping[CodeFormat, Mapping[str, int]] = {CodeFormat.BLOCK_FP8: {"num_warps": 4, "maxnreg": 96}}
"""Warps and registers by code format: the fastest of those tried on an H200 (benchmarks/results/kernels_h200.md)."""
_OTHERS: Mapping[str, int] = {"num_warps": 8}
_MASK = 2**64 - 1
# Odd, so that multiplication by it is invertible modulo 2^64; from Knuth's linear congruential generator MMIX.
_FACTOR = 6364136223846793005


def gather(block: Block, before: int | None) -> int | None:
    """See `megarl.resharding.kernels.gather`."""
    conversions = block.table.conversions
    if conversions:
        torch._foreach_copy_([packed for packed, _ in conversions], [local for _, local in conversions])
    for each in block.table.in_torch:
        each.quantise()
    return _launch(block, before, to_bucket=True)


def scatter(block: Block, before: int | None) -> int | None:
    """See `megarl.resharding.kernels.scatter`."""
    conversions = block.table.conversions
    total = _launch(block, before, to_bucket=False)
    if conversions:
        torch._foreach_copy_([local for _, local in conversions], [packed for packed, _ in conversions])
    return total


def launch_options(code_format: CodeFormat) -> Mapping[str, int]:
    """Triton's launch options: warps, a register limit for some formats, and no fused multiply-add."""
    return {**_LAUNCHES.get(code_format, _OTHERS), "enable_fp_fusion": False}


def _launch(block: Block, before: int | None, *, to_bucket: bool) -> int | None:
    table = block.table
    results = torch.zeros(SUMS + 1, dtype=torch.int64, device=block.memory.device)
    if table.tiles:
        grid = (table.tiles,)
        constants = (int(table.code_format), to_bucket, before is not None, device.has_e4m3(block.memory.device))
        move[grid](table.rows, table.row_of_tile, results, *constants, **launch_options(table.code_format))
    if before is None and not block.quantised:
        return None
    *sums, unfailed = results.tolist()
    if unfailed:
        matrix = table.matrix_of_tile(table.tiles - unfailed)
        # Quantise again in torch, which raises an error that names the tensor and the block.
        matrix.quantise()
        raise AssertionError(f"the kernel refuses numbers of {matrix.name} that its number format takes")
    return None if before is None else (before * _FACTOR + sum(sums)) & _MASK
