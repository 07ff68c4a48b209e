"""Processes that a program has left behind, where no namespace ends them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path


def kill_descendants() -> None:
    """Kill and collect all processes below this one, which must be what orphans are given to."""
    while True:
        for pid in _descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.wait()
        except ChildProcessError:
            return


def tasks_of_user(user: int) -> int:
    """How many threads all processes of a user have, as the kernel counts them for RLIMIT_NPROC."""
    count = 0
    for _, status in _processes():
        if int(status["Uid"].split()[0]) == user:
            count += int(status["Threads"])
    return count


def _descendants() -> list[int]:
    parents = {pid: int(status["PPid"]) for pid, status in _processes()}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def _processes() -> Iterator[tuple[int, dict[str, str]]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                lines = Path("/proc", name, "status").read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended
            yield int(name), dict(line.split(":", 1) for line in lines if ":" in line)
