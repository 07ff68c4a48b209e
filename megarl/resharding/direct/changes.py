"""Changes of a message since it was last sent: the bitwise difference, deflated.

A step of RL leaves nearly all weights in bf16 as they are, so that the difference is zeros but for a few per cent of
the elements (benchmarks/results/weight_changes_cpu.md). It is exact for every type, and nothing has to know which.
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

# A chunk is deflated by itself, and is still in a processor's cache when it is. Its length stands before all of them.
_CHUNK_BYTES = 2**20
_LENGTH = torch.int32
# Level 1 of ISA-L is as fast as 0 here and makes less; negative window bits leave out head and checksum.
_LEVEL, _RAW = 1, -15


class SentMessages:
    """The messages as they were last sent, on the host: as much memory as a rank sends in a refit."""

    def __init__(self) -> None:
        self._sent: dict[MessageId, tuple[int, Tensor]] = {}

    def forget(self, message: MessageId) -> None:
        """Let a message travel whole when it is next sent."""
        del self._sent[message]

    def replace(self, message: MessageId, version: int, memory: Tensor) -> tuple[TransferStats, int | None]:
        """Keep a packed message (uint8) as that of `version`, and let `memory` begin with its changes.

        It does if these are fewer bytes; returned are the bytes to send and the version that they are changes of, None
        where they are the message.
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
    """How a message (uint8 in `memory`) differs from the one `before` (uint8, on the host), which becomes it.

    The changes (uint8, on the host), None where they would be no fewer bytes, and how many units have changed.
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
    """Turn the message in `memory` (uint8) into the one that it was changed to.

    Raises ValueError if these are not changes of a message of this size.
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
    """The message in words: its size is a multiple of its alignment, which is several."""
    return list(message.view(torch.int64).split(_CHUNK_BYTES // torch.int64.itemsize))


def _bytes(read: bytes) -> Tensor:
    # A copy: torch warns of memory that cannot be written.
    return torch.frombuffer(bytearray(read), dtype=torch.uint8)
