"""Processes by the file that they write to: all that one starts inherit its output, whoever their parent is."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_LEAVE_S = 5.0
"""Time in which processes that end by themselves may put away what they hold."""
_END_S = 60.0
_POLL_S = 0.05
_ENDED = ("Z", "X")
"""States of a thread that has given back all that it held, as /proc has them."""
_STATE, _BEGAN = 0, 19
"""Places in /proc/PID/stat, behind the name."""


def end_other_writers(log: Path) -> None:
    """Return when no other process of this machine has `log` as its output; those that stay are killed.

    One that was seen to have it is waited for until it is gone: as it ends, it loses its files before a driver has
    freed what belongs to them, such as the memory of a GPU. Raises TimeoutError for one that the kernel does not let
    end, as may be where it waits for a device.
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
    """The other processes of this machine that have `log` as their output, by their ids."""
    if not log.exists():
        return
    file, name = _File.of(log), log.resolve().name
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) != os.getpid() and file in _outputs(process, name):
            yield int(process.name)


@dataclass(frozen=True)
class _File:
    """A file, whatever its path is: that is another in another container, or the same for another file there."""

    device: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Self:
        found = path.stat()
        return cls(found.st_dev, found.st_ino)


@dataclass(frozen=True)
class _Process:
    """A process, with the time at which it began: others get its id when it is gone."""

    pid: int
    began: str

    @classmethod
    def of(cls, pid: int) -> Self:
        return cls(pid, _stat(Path(f"/proc/{pid}"), _BEGAN))

    @property
    def is_there(self) -> bool:
        """Whether it still holds anything."""
        process = Path(f"/proc/{self.pid}")
        states = {_stat(thread, _STATE) for thread in _threads(process)} - {"", *_ENDED}
        return bool(states) and _stat(process, _BEGAN) == self.began


def _still(processes: set[_Process]) -> Iterator[_Process]:
    return (each for each in processes if each.is_there)


def _outputs(process: Path, name: str) -> set[_File]:
    outputs = _files(process, name)
    if not outputs and _stat(process, _STATE) in _ENDED:
        # Its first thread has ended, and has no files any more; another may be stuck in a call of a driver.
        outputs = set().union(*(_files(thread, name) for thread in _threads(process)))
    return outputs


def _files(thread: Path, name: str) -> set[_File]:
    """Files of this name that are the outputs of a thread; none of one that is another user's, or is ending.

    Files of other names are not looked at: they may be where nothing answers, as a server of NFS that is gone.
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
    """One of the fields of a thread, or of the first one of a process; empty where it is gone, or is not shown."""
    with suppress(OSError):
        # The name may have blanks and brackets of its own, and half a character at its end.
        return (thread / "stat").read_bytes().rpartition(b")")[2].split()[place].decode()
    return ""
