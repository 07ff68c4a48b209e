"""Waiting for what another process does."""

import time
from collections.abc import Callable
from contextlib import suppress

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, also where nobody asked for its exit code yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def descendants() -> dict[psutil.Process, str]:
    """The processes that come from this one, with their command lines, without those that end meanwhile."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[process] = " ".join(process.cmdline())
    return found


def eventually(condition: Callable[[], object], timeout_s: float = 120.0) -> bool:
    """Whether the condition comes true within the time, by default one that processes need to start among many."""
    deadline = time.monotonic() + timeout_s
    while not (holds := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds
