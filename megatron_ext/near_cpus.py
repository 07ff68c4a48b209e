"""Pins a process to the CPUs close to its GPU, so that it also allocates host memory close to it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_DEVICES = Path("/sys/bus/pci/devices")
_THREADS = Path("/proc/self/task")


def stay_near(address: str, devices: Path = _DEVICES) -> None:
    """Pin all threads of this process, and later ones, to those of its CPUs that are local to a PCI device.

    Does nothing if none of its CPUs is local, or the machine does not say. Example: stay_near("0000:1b:00.0")
    """
    # A container may hide the file or forbid the call, and threads may end meanwhile.
    with suppress(OSError):
        near = set(_numbers((devices / address / "local_cpulist").read_text())) & os.sched_getaffinity(0)
        for thread in _THREADS.iterdir() if near else ():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), near)


def _numbers(text: str) -> Iterator[int]:
    """Parse a list of CPUs in Linux's format. Example: "0-2,8" """
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)
