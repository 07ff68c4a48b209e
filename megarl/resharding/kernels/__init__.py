"""Kernels of a refit: one pass that moves a block's boxes, checksums them, and quantises them.

On a CPU they are machine code, with torch for what it does not support; on a GPU they are Triton, with one launch per
bucket. Both make the same bytes.
"""

from types import ModuleType

from megarl.resharding.kernels import host
from megarl.resharding.kernels.block import Block
from megarl.resharding.kernels.moves import is_known, rule_of
from megarl.resharding.kernels.quantised import Quantised

__all__ = ["Block", "Quantised", "gather", "is_known", "rule_of", "scatter"]


def gather(block: Block, before: int | None) -> int | None:
    """Copy this rank's boxes into the bucket, in the bucket's dtypes. Returns the checksum of the bucket's bytes.

    The checksum continues from `before`, that of the memory before the block; with None no checksum is computed. Raises
    ValueError, naming the tensor, for a box that cannot be quantised.
    """
    return _kernels(block).gather(block, before)


def scatter(block: Block, before: int | None) -> int | None:
    """Copy the boxes from the bucket into this rank's tensors. Returns the checksum of the copied bytes, as `gather`.

    Codes and scales are plain boxes here, as engines hold them as they are.
    """
    assert not block.quantised
    return _kernels(block).scatter(block, before)


def _kernels(block: Block) -> ModuleType:
    if block.memory.device.type == "cpu":
        return host
    # Imported late: Triton is slow to import, and not installed on every machine without a GPU.
    from megarl.resharding.kernels import on_gpu

    return on_gpu
