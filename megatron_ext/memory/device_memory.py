"""Memory of the device that a machine without GPUs is to its processes: counted, and limited if that is asked for.

The driver of a GPU counts what all processes hold, and refuses what does not fit. Without one the processes count for
themselves, each in a file that it keeps locked, what they would hold on a GPU: weights, gradients, state of optimizers,
caches of engines. So one that was killed holds nothing. Activations are not counted.
"""

import fcntl
import os
import secrets
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

_BYTES = struct.Struct("<q")


class DeviceFullError(UserError):
    """The device has no room beside what all processes hold."""


class CountedMemory:
    """The counts in the file at `path`, which is made by whoever opens it first, and in others beside it.

    Example: CountedMemory(Path("/tmp/run/device"), limit_bytes=2**30); a process that is given it has held nothing yet.
    """

    def __init__(self, path: Path, limit_bytes: int | None = None) -> None:
        self._path, self._limit_bytes = path, limit_bytes
        self._own: dict[str, int] = {}
        self._own_file: int | None = None

    def hold(self, what: str, nbytes: int) -> None:
        """Note that this process from now on holds `nbytes` as `what`, in place of what it held as that.

        Raises DeviceFullError, with nothing noted, if all processes would then hold more than the limit.
        """
        before = self._own.get(what, 0)
        with self._peak() as peak:
            held = self._held()
            after = held - before + nbytes
            if self._limit_bytes is not None and nbytes > before and after > self._limit_bytes:
                raise DeviceFullError(
                    f"{what}, {nbytes:,} bytes, do not fit beside the {held - before:,} that are held:"
                    f" cluster.device_memory_bytes is {self._limit_bytes:,}, raise it, or make model or cache smaller"
                )
            self._own[what] = nbytes
            if self._own_file is None:
                self._own_file = _open_locked(self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}"))
            _write(self._own_file, sum(self._own.values()))
            _write(peak, max(_read(peak), after))

    def take_peak(self) -> int:
        """The most that all processes held at a time since this was last asked, by whomever."""
        with self._peak() as peak:
            most = _read(peak)
            _write(peak, self._held())
        return most

    @contextmanager
    def _peak(self) -> Iterator[int]:
        """Open the file that tells of the most that was held, and keep it from the others inside."""
        peak = _open_locked(self._path)
        try:
            yield peak
        finally:
            os.close(peak)

    def _held(self) -> int:
        """The sum of what all processes hold that live."""
        held = 0
        for path in self._path.parent.glob(f"{self._path.name}.*"):
            counts = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(counts, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held += _read(counts)
            else:
                path.unlink()
            finally:
                os.close(counts)
        return held


def take_peak(memory: CountedMemory | None) -> int:
    """The most that was held on this process's device, by all processes, since its last turn began.

    On a GPU that is what is in use now: during a turn nobody gives memory back to the driver.
    """
    used = device.used_memory_bytes()
    if used is not None:
        return used
    return 0 if memory is None else memory.take_peak()


def _open_locked(path: Path) -> int:
    """Open a file that is locked until it is closed, or its process ends."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _read(file: int) -> int:
    found = os.pread(file, _BYTES.size, 0)
    return _BYTES.unpack(found)[0] if found else 0


def _write(file: int, nbytes: int) -> None:
    os.pwrite(file, _BYTES.pack(nbytes), 0)
