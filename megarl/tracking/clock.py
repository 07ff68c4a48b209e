"""Measures seconds per stage."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function


class Clock:
    """Adds up the wall time of named stages per step; steps follow each other without gaps."""

    def __init__(self) -> None:
        self._present = ""
        self._begin_step()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside towards `name`."""
        started, around = time.perf_counter(), self._present
        self._present = name
        try:
            with record_function(name):
                yield
        finally:
            self._present = around
            self._seconds[name] += time.perf_counter() - started

    def status_line(self, longer_than_s: float) -> str:
        """The current stage and its time, if the step has taken longer than `longer_than_s`; else empty."""
        seconds = time.perf_counter() - self._started
        if seconds < longer_than_s:
            return ""
        return f"{self._present or 'between two stages'}, {seconds / 60:.0f} min since the step began"

    def end_step(self, tokens: int) -> dict[str, float]:
        """End the step, and return its metrics: seconds of every stage, of the step, and outside all stages.

        Work between two steps, such as logging and checkpoints, belongs to the later one. `tokens` is the step's number
        of tokens, for its tokens per second.
        """
        total = time.perf_counter() - self._started
        seconds = {**self._seconds, "step": total, "overhead": total - sum(self._seconds.values())}
        self._begin_step()
        return {
            **{f"seconds/{name}": value for name, value in seconds.items()},
            "throughput/tokens_per_s": tokens / total,
        }

    def _begin_step(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
