"""Finds processes by their output file: all descendants of a process inherit it, even when reparented."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_LEAVE_S = 5.0
"""Seconds for processes that end by themselves to clean up."""
_END_S = 60.0
_POLL_S = 0.05
_ENDED = ("Z", "X")
"""Thread states in /proc of a thread that has released everything it held."""
_STATE, _BEGAN = 0, 19
"""Indices in /proc/PID/stat, after the name."""


def end_other_writers(log: Path) -> None:
    """Wait until no other process of this machine has `log` as its output, and kill those that do not end.

    A process once seen with `log` is waited for until it is gone: an ending process closes its files before drivers
    free its resources, such as GPU memory. Raises TimeoutError if the kernel does not let one end, as may be when it
    waits for a device.
    """
    began = time.monotonic()
    others = set[_Process]()
    while others := {*_still(others), *map(_Process.of, other_writers(log))}:
        passed = time.monotonic() - began
        if passed > _END_S:
            pids = sorted(each.pid for each in others)
            raise TimeoutError(f"processes {pids}, which write to {log}, did not end in {_END_S:g} s after SIGKILL")
        if passed > _LEAVE_S:
            for each in others:
                with suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def other_writers(log: Path) -> Iterator[int]:
    """The ids of the other processes of this machine that have `log` as their output."""
    if not log.exists():
        return
    file, name = _File.of(log), log.resolve().name
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) != os.getpid() and file in _outputs(process, name):
            yield int(process.name)


@dataclass(frozen=True)
class _File:
    """A file by identity, as another container may have another path for it, or another file at its path."""

    device: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Self:
        found = path.stat()
        return cls(found.st_dev, found.st_ino)


@dataclass(frozen=True)
class _Process:
    """A process identified by id and start time, as ids are reused."""

    pid: int
    began: str

    @classmethod
    def of(cls, pid: int) -> Self:
        return cls(pid, _stat(Path(f"/proc/{pid}"), _BEGAN))

    @property
    def is_there(self) -> bool:
        """Whether it still holds resources."""
        process = Path(f"/proc/{self.pid}")
        states = {_stat(thread, _STATE) for thread in _threads(process)} - {"", *_ENDED}
        return bool(states) and _stat(process, _BEGAN) == self.began


def _still(processes: set[_Process]) -> Iterator[_Process]:
    return (each for each in processes if each.is_there)


def _outputs(process: Path, name: str) -> set[_File]:
    outputs = _files(process, name)
    if not outputs and _stat(process, _STATE) in _ENDED:
        # The main thread has ended and has no files any more, but another thread may be stuck in a driver call.
        outputs = set().union(*(_files(thread, name) for thread in _threads(process)))
    return outputs


def _files(thread: Path, name: str) -> set[_File]:
    """Files of this name that are a thread's outputs; none for another user's thread, or an ending one.

    Files of other names are not examined: they may be on a file system that hangs, such as NFS without its server.
    """
    found = set()
    for output in (thread / "fd" / "1", thread / "fd" / "2"):
        with suppress(OSError):
            if Path(os.readlink(output)).name == name:
                found.add(_File.of(output))
    return found


def _threads(process: Path) -> list[Path]:
    with suppress(OSError):
        return [process / "task" / thread for thread in os.listdir(process / "task")]
    return []


def _stat(thread: Path, place: int) -> str:
    """One field of a thread, or of a process's main thread; empty if it is gone or not visible."""
    with suppress(OSError):
        # The name may contain blanks and brackets, and end in half a character.
        return (thread / "stat").read_bytes().rpartition(b")")[2].split()[place].decode()
    return ""
