"""Kernels of a refit: one pass that moves a block's boxes, takes their checksum, and quantises them.

On a CPU in machine code, and in torch what that does not know; on a GPU in Triton, in one launch for a whole bucket.
Both make the same bytes.
"""

from types import ModuleType

from megarl.resharding.kernels import host
from megarl.resharding.kernels.block import Block
from megarl.resharding.kernels.moves import is_known, rule_of
from megarl.resharding.kernels.quantised import Quantised

__all__ = ["Block", "Quantised", "gather", "is_known", "rule_of", "scatter"]


def gather(block: Block, before: int | None) -> int | None:
    """Copy this rank's boxes into the bucket, in the bucket's types; the checksum of what lies there then.

    It is continued from that of the memory `before` the block, or not taken where `before` is None. Raises ValueError,
    naming the tensor, for a box that cannot be quantised.
    """
    return _kernels(block).gather(block, before)


def scatter(block: Block, before: int | None) -> int | None:
    """Copy the boxes out of the bucket into this rank's tensors; the checksum of what was copied, as `gather`.

    Codes and scales are boxes as any others here: engines keep them.
    """
    assert not block.quantised
    return _kernels(block).scatter(block, before)


def _kernels(block: Block) -> ModuleType:
    if block.memory.device.type == "cpu":
        return host
    # Triton takes long to import, and is not there on every machine without a GPU.
    from megarl.resharding.kernels import on_gpu

    return on_gpu
