"""Functions that benchmarks share: the machine's description, the type of a count option, and the output of a page."""

import argparse
import os
from pathlib import Path

import psutil


def cpu_name() -> str:
    """The processor's model name."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else "unknown CPU"


def describe(folder: Path) -> str:
    """The machine in one line: processor, cores, memory, kernel, the file system of `folder`, and the load."""
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    file_system = next((mounts[place] for place in (folder, *folder.parents) if place in mounts), "unknown")
    memory_gib = round(psutil.virtual_memory().total / 2**30)
    return (
        f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}, {memory_gib} GiB, Linux {os.uname().release},"
        f" {file_system}; load average before the first run {os.getloadavg()[0]:.1f}"
    )


def at_least_one(text: str) -> int:
    """The argparse type of a count."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too small: it must be at least 1")
    return number


def give_out(page: str, file: Path | None) -> None:
    """Write a page to `file`, or print it if that is None."""
    if file is None:
        print(page)
    else:
        file.write_text(page)
