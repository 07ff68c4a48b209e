"""Anonymous and shared memory of processes, measured from outside."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_SAMPLE_EVERY_S = 0.003


@dataclass(frozen=True)
class Held:
    """Memory of a process in bytes; shared memory counts in each process that has touched it."""

    anonymous: int
    shared: int

    def __sub__(self, other: "Held") -> "Held":
        return Held(self.anonymous - other.anonymous, self.shared - other.shared)

    def most(self, other: "Held") -> "Held":
        """The elementwise maximum."""
        return Held(max(self.anonymous, other.anonymous), max(self.shared, other.shared))


def held_by(pid: int) -> Held:
    """RssAnon and RssShmem of a running process."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssShmem"):
            found[name] = int(value.split()[0]) * 1024
    return Held(found["RssAnon"], found["RssShmem"])


def give_back() -> None:
    """Return this process's freed memory to the kernel, so that new allocations become visible."""
    ctypes.CDLL(None).malloc_trim(0)


class Growth:
    """Peak growth of each process's memory within the context, sampled."""

    def __init__(self, held: Callable[[], Sequence[Held]]) -> None:
        self._held = held
        self._before = self._most = list(held())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def of_ranks(self) -> list[Held]:
        """Rank by rank."""
        return [most - before for most, before in zip(self._most, self._before, strict=True)]

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_EVERY_S):
            self._most = [most.most(now) for most, now in zip(self._most, self._held(), strict=True)]
