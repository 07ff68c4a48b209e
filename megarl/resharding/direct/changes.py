"""Changes of a message since it was last sent: the XOR of both versions, deflated.

An RL step leaves nearly all bf16 weights unchanged, so the XOR is zero except in a few per cent of the elements
(benchmarks/results/weight_changes_cpu.md). It is exact for every dtype, and the code need not know which one.
"""

from collections.abc import Iterator

import numpy as np
import torch
from isal import isal_zlib
from torch import Tensor

from megarl.resharding.direct.messages_by_peer import MessageId
from megarl.resharding.transfer_stats import TransferStats

UNIT = torch.int16
"""The unit in which changes are counted: an element of bf16, half of a float32, two codes of FP8."""

# Each chunk is deflated separately, while it is still in the CPU cache. A table of their lengths precedes the chunks.
_CHUNK_BYTES = 2**20
_LENGTH = torch.int32
# ISA-L's level 1 is as fast as 0 here and compresses better; negative window bits omit the zlib header and checksum.
_LEVEL, _RAW = 1, -15


class SentMessages:
    """Host copies of the messages as last sent: they take as much memory as a rank sends in one refit."""

    def __init__(self) -> None:
        self._sent: dict[MessageId, tuple[int, Tensor]] = {}

    def forget(self, message: MessageId) -> None:
        """Send this message whole next time."""
        del self._sent[message]

    def replace(self, message: MessageId, version: int, memory: Tensor) -> tuple[TransferStats, int | None]:
        """Store the packed message in `memory` (uint8) as `version`, and overwrite its start with the changes.

        `memory` keeps the whole message if that is no larger. Returns the bytes to send, and the version that the
        changes are relative to: None if the message travels whole.
        """
        if message not in self._sent:
            self._sent[message] = version, memory.to("cpu", copy=True)
            return TransferStats(len(memory)), None
        since, before = self._sent[message]
        self._sent[message] = version, before
        changes, changed = changes_of(memory, before)
        compared = len(memory) // UNIT.itemsize
        if changes is None:
            return TransferStats(len(memory), compared, changed), None
        memory[: len(changes)].copy_(changes)
        return TransferStats(len(changes), compared, changed), since


def changes_of(memory: Tensor, before: Tensor) -> tuple[Tensor | None, int]:
    """Return the changes from `before` (uint8, on the host) to `memory` (uint8), and update `before` to match.

    Returns the changes (uint8, on the host; None if they would be no smaller than the message) and the number of
    changed units.
    """
    deflated: list[bytes] = []
    size, changed = len(_chunks(memory)) * _LENGTH.itemsize, 0
    for now, then in zip(_chunks(memory), _chunks(before), strict=True):
        on_host = now.cpu()
        difference = on_host ^ then
        changed += int(np.count_nonzero(difference.view(UNIT).numpy()))
        then.copy_(on_host)
        if size < len(memory):
            deflated.append(isal_zlib.compress(difference.view(torch.uint8).numpy(), _LEVEL, _RAW))
            size += len(deflated[-1])
    if size >= len(memory):
        return None, changed
    lengths = torch.tensor([len(each) for each in deflated], dtype=_LENGTH)
    return torch.cat([lengths.view(torch.uint8), *(_bytes(each) for each in deflated)]), changed


def apply_changes(changes: Tensor, memory: Tensor) -> None:
    """Apply `changes` to the message in `memory` (uint8), in place.

    Raises ValueError if the changes are not of a message of this size.
    """
    chunks = _chunks(memory)
    for chunk, deflated in zip(chunks, _deflated(changes.cpu(), len(chunks)), strict=True):
        try:
            difference = isal_zlib.decompress(deflated.numpy(), _RAW, chunk.nbytes)
        except isal_zlib.error as error:  # type: ignore[misc]  # the stub makes an object of the class
            raise ValueError(f"changes that cannot be read: {error}") from error
        if len(difference) != chunk.nbytes:
            raise ValueError(f"changes of {len(difference)} bytes in place of {chunk.nbytes}")
        chunk ^= _bytes(difference).view(chunk.dtype).to(chunk.device)


def _deflated(changes: Tensor, chunks: int) -> Iterator[Tensor]:
    table = changes[: chunks * _LENGTH.itemsize]
    if len(table) < chunks * _LENGTH.itemsize:
        raise ValueError(f"changes of {len(changes)} bytes for {chunks} chunks")
    end = len(table)
    for length in table.clone().view(_LENGTH).tolist():
        yield changes[end : end + length]
        end += length


def _chunks(message: Tensor) -> list[Tensor]:
    """The message as int64 chunks: its size is a multiple of the alignment, so whole words fit."""
    return list(message.view(torch.int64).split(_CHUNK_BYTES // torch.int64.itemsize))


def _bytes(read: bytes) -> Tensor:
    # Copied because torch warns about read-only memory.
    return torch.frombuffer(bytearray(read), dtype=torch.uint8)
