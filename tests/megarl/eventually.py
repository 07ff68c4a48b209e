"""Waiting for what another process does."""

import time
from collections.abc import Callable

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, also where nobody asked for its exit code yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def eventually(condition: Callable[[], object], timeout_s: float = 30.0) -> bool:
    """Whether the condition comes true within the time."""
    deadline = time.monotonic() + timeout_s
    while not (holds := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds
