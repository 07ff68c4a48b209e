"""Processes by the file that they write to: all that one starts inherit its output, whoever their parent is."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LEAVE_S = 5.0
"""Time in which processes that end by themselves may put away what they hold."""
_END_S = 60.0
_POLL_S = 0.05


def end_other_writers(log: Path) -> None:
    """Return when no other process of this machine has `log` as its output; those that stay are killed.

    Raises TimeoutError for one that the kernel does not let end, as may be where it waits for a device.
    """
    began = time.monotonic()
    while others := list(other_writers(log.resolve())):
        passed = time.monotonic() - began
        if passed > _END_S:
            raise TimeoutError(f"processes {others}, which write to {log}, did not end in {_END_S:g} s after SIGKILL")
        if passed > _LEAVE_S:
            for pid in others:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def other_writers(log: Path) -> Iterator[int]:
    """The other processes of this machine that have `log` as their output, by their ids."""
    for process in Path("/proc").glob("[0-9]*"):
        # Processes of others, and those that end while they are looked at.
        with suppress(PermissionError, FileNotFoundError, ProcessLookupError):
            outputs = {os.readlink(process / "fd" / descriptor) for descriptor in ("1", "2")}
            if str(log) in outputs and int(process.name) != os.getpid():
                yield int(process.name)
