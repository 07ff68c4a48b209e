"""The CPUs next to a GPU, on which a process has the shortest way to it, and fills memory that it reads from there."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_DEVICES = Path("/sys/bus/pci/devices")
_THREADS = Path("/proc/self/task")


def stay_near(address: str, devices: Path = _DEVICES) -> None:
    """Keep this process on those of its CPUs that are next to the PCI device at `address`: all threads, and later ones.

    It stays where it is if none of them is, or the machine does not tell. Example: stay_near("0000:1b:00.0")
    """
    # A container may hide the file, or forbid the call; threads end meanwhile.
    with suppress(OSError):
        near = set(_numbers((devices / address / "local_cpulist").read_text())) & os.sched_getaffinity(0)
        for thread in _THREADS.iterdir() if near else ():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), near)


def _numbers(text: str) -> Iterator[int]:
    """The numbers of a list as Linux writes it. Example: "0-2,8" """
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)
