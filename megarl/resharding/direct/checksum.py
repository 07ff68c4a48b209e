"""Checksums of what lies in a bucket, made by the sender and again by the receiver."""

import torch
from isal import isal_zlib
from torch import Tensor

_CHUNK_WORDS = 2**22
_MASK = 2**64 - 1
# Odd, so that a multiplication loses nothing modulo 2^64; from Knuth's linear congruential generator MMIX.
_FACTOR = 6364136223846793005


def checksum(memory: Tensor, before: int = 0) -> int:
    """A checksum of `memory` (uint8, one dimension), continued from that of the memory `before` it.

    On the host a CRC-32; on a device, whose `memory` has to be a multiple of 4 bytes, `weighted_sum`.
    """
    if memory.device.type == "cpu":
        return isal_zlib.crc32(memory.numpy(), before)
    return weighted_sum(memory, before)


def weighted_sum(memory: Tensor, before: int = 0) -> int:
    """The sum of all 32-bit words of `memory`, each times its position in a chunk, modulo 2^64.

    A changed word, two words in each other's place and chunks in another order all give another sum.
    """
    total = before
    words = memory.view(torch.int32)
    for chunk in words.split(_CHUNK_WORDS):
        positions = torch.arange(1, len(chunk) + 1, dtype=torch.int64, device=memory.device)
        total = (total * _FACTOR + int((chunk * positions).sum())) & _MASK
    return total
