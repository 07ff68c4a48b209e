"""Counts, and optionally limits, the memory that processes would hold on a GPU, on machines without one.

A GPU's driver counts the memory of all processes, and refuses allocations that do not fit. Without a GPU, each process
counts its weights, gradients, optimizer state or KV cache in a file that it keeps locked, so a killed process counts as
holding nothing. Activations are not counted.
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
"""`weights` are a model's parameters and buffers; `training` its gradients, optimizer state and reference weights."""
ALL_PARTS: tuple[StatePart, ...] = get_args(StatePart)

_BYTES = struct.Struct("<q")


class DeviceFullError(UserError):
    """The device has no room left for an allocation."""


class CountedMemory:
    """The memory counts of all processes that use the same `path`.

    The file at `path`, created by whoever opens it first, holds the peak; each process has a file of its own next to
    it. An object may be sent to another process only before it holds anything.

    Example: CountedMemory(Path("/tmp/run/device"), limit_bytes=2**30)
    """

    def __init__(self, path: Path, limit_bytes: int | None = None) -> None:
        self._path, self._limit_bytes = path, limit_bytes
        self._own: dict[str, int] = {}
        self._own_file: int | None = None

    def hold(self, what: str, nbytes: int) -> None:
        """Record that this process now holds `nbytes` as `what`, replacing its earlier count for `what`.

        Raises DeviceFullError, without recording anything, if the count grows and all processes together would exceed
        the limit.
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
        """The peak of all processes' memory since any process last called this."""
        with self._peak() as peak:
            most = _read(peak)
            _write(peak, self._held())
        return most

    @contextmanager
    def _peak(self) -> Iterator[int]:
        """Open the file with the peak, and lock out other processes within the context."""
        peak = _open_locked(self._path)
        try:
            yield peak
        finally:
            os.close(peak)

    def _held(self) -> int:
        """The memory of all live processes; removes the files of dead ones."""
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
    """The peak of all processes' memory on this process's device since the last turn began.

    On a GPU this is the memory in use now, since no process returns memory to the driver during a turn. 0 on a machine
    without GPUs if nothing is counted.
    """
    used = device.used_memory_bytes()
    if used is not None:
        return used
    return 0 if memory is None else memory.take_peak()


def _open_locked(path: Path) -> int:
    """Open a file and lock it until it is closed or the process ends."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _read(file: int) -> int:
    found = os.pread(file, _BYTES.size, 0)
    return _BYTES.unpack(found)[0] if found else 0


def _write(file: int, nbytes: int) -> None:
    os.pwrite(file, _BYTES.pack(nbytes), 0)
