"""Seconds per stage."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the wall time of named stages, from the moment it is made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside towards `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    def metrics(self, tokens: int) -> dict[str, float]:
        """Seconds of every stage, of all together and of what was in no stage; and `tokens` per second."""
        total = time.perf_counter() - self._started
        seconds = {**self._seconds, "step": total, "overhead": total - sum(self._seconds.values())}
        return {
            **{f"seconds/{name}": value for name, value in seconds.items()},
            "throughput/tokens_per_s": tokens / total,
        }
