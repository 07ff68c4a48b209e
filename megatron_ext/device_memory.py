"""Memory of the device that a machine without GPUs is to its processes: counted, and limited if that is asked for.

The driver of a GPU counts what all processes hold, and refuses what does not fit. Without one the processes count for
themselves, in a file that all of them open, what they would hold on a GPU: weights, gradients, state of optimizers,
caches of engines. Activations are not counted.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from converters.errors import UserError
from megatron_ext import device

StatePart: TypeAlias = Literal["weights", "training"]
"""Parameters and buffers of a model; gradients, state of the optimizer and weights of the reference model."""
ALL_PARTS: tuple[StatePart, ...] = get_args(StatePart)

_COUNTS = struct.Struct("<qq")


class DeviceFullError(UserError):
    """The device has no room beside what all processes hold."""


class CountedMemory:
    """The counts in the file at `path`, which is made by whoever opens it first.

    Example: CountedMemory(Path("/tmp/run/device"), limit_bytes=2**30); a process that is given it has held nothing yet.
    """

    def __init__(self, path: Path, limit_bytes: int | None = None) -> None:
        self._path, self._limit_bytes = path, limit_bytes
        self._own: dict[str, int] = {}

    def hold(self, what: str, nbytes: int) -> None:
        """Note that this process from now on holds `nbytes` as `what`, in the place of what it held as that.

        Raises DeviceFullError, with nothing noted, if all processes would then hold more than the limit.
        """
        before = self._own.get(what, 0)
        with self._counts() as counts:
            held, peak = _read(counts)
            after = held - before + nbytes
            if self._limit_bytes is not None and nbytes > before and after > self._limit_bytes:
                raise DeviceFullError(
                    f"{what}, {nbytes:,} bytes, do not fit beside the {held - before:,} that are held:"
                    f" cluster.device_memory_bytes is {self._limit_bytes:,}, raise it, or make model or cache smaller"
                )
            _write(counts, after, max(peak, after))
        self._own[what] = nbytes

    def take_peak(self) -> int:
        """The most that all processes held at a time since this was last asked, by whomever."""
        with self._counts() as counts:
            held, peak = _read(counts)
            _write(counts, held, held)
        return peak

    @contextmanager
    def _counts(self) -> Iterator[int]:
        """Open the file, and keep it from the others inside."""
        counts = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(counts, fcntl.LOCK_EX)
            yield counts
        finally:
            os.close(counts)


def take_peak(memory: CountedMemory | None) -> int:
    """The most that was held on this process's device, by all processes, since its last turn began.

    On a GPU that is what is in use now: during a turn nobody gives memory back to the driver.
    """
    used = device.used_memory_bytes()
    if used is not None:
        return used
    return 0 if memory is None else memory.take_peak()


def _read(counts: int) -> tuple[int, int]:
    found = os.pread(counts, _COUNTS.size, 0)
    return _COUNTS.unpack(found) if found else (0, 0)


def _write(counts: int, held: int, peak: int) -> None:
    os.pwrite(counts, _COUNTS.pack(held, peak), 0)
