"""A rank stays on the CPUs next to its GPU, on a machine that is made up of files."""

import multiprocessing
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ext import device
from megatron_ext.near_cpus import stay_near

ADDRESS = "0000:1b:00.0"
OWN = os.sched_getaffinity(0)
LAST = max(OWN)


def cpus_of_threads(devices: Path, queue: multiprocessing.SimpleQueue) -> None:
    """CPUs of this thread, of one that was there before, and of one that it starts."""
    end, started = threading.Event(), threading.Event()
    found: list[set[int]] = []

    def look() -> None:
        started.set()
        end.wait()
        found.append(os.sched_getaffinity(0))

    before = threading.Thread(target=look)
    before.start()
    started.wait()
    stay_near(ADDRESS, devices)
    after = threading.Thread(target=look)
    after.start()
    end.set()
    before.join()
    after.join()
    queue.put([os.sched_getaffinity(0), *found])


@pytest.mark.skipif(len(OWN) < 2, reason="a process of one CPU has no choice")
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{LAST},{LAST + 5}-{LAST + 70}\n", {LAST}),
        (f"{LAST}-{LAST + 3}\n", {LAST}),
        (f"{LAST + 1}-{LAST + 70}\n", OWN),
        ("\n", OWN),
        (None, OWN),
    ],
    ids=["one of them", "a range", "none of them", "empty", "no file"],
)
def test_all_threads_stay_on_the_cpus_next_to_the_gpu(tmp_path: Path, content: str | None, expected: set[int]) -> None:
    if content is not None:
        (tmp_path / ADDRESS).mkdir()
        (tmp_path / ADDRESS / "local_cpulist").write_text(content)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=cpus_of_threads, args=(tmp_path, queue))
    process.start()
    process.join()
    assert queue.get() == [expected] * 3


def test_a_rank_that_has_its_gpu_stays_near_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    addresses: list[str] = []
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(device, "stay_near", addresses.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(pci_domain_id=16 * index, pci_bus_id=0x1B, pci_device_id=index),
    )
    device.bind(9)
    assert (chosen, addresses) == ([1], ["0010:1b:01.0"])
