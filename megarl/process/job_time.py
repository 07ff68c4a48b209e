"""The time limit of a job: whether one more step and a checkpoint fit into the time left."""

import time
from collections.abc import Mapping
from typing import Self

_RESERVE = 1.25
"""Safety factor on the longest step and the longest checkpoint so far, as the next ones may take longer."""
_END_S = 60.0
"""Seconds reserved for ending the processes."""


class JobTime:
    """Measures the steps of a run, and knows that its job ends at `end_s`, in seconds since 1970.

    With `end_s` None the job has no time limit.
    """

    def __init__(self, end_s: float | None = None) -> None:
        self._end_s = end_s
        self._longest_s = 0.0
        self._since_s = time.monotonic()

    @property
    def is_limited(self) -> bool:
        """Whether the job has a time limit."""
        return self._end_s is not None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """The time limit of a Slurm job, which Slurm 23.02 and later export; unlimited elsewhere."""
        end = environment.get("SLURM_JOB_END_TIME", "")
        return cls(float(end) if end.isdecimal() else None)

    def begin_step(self) -> None:
        """Start timing a step; the first one starts with this object."""
        self._since_s = time.monotonic()

    def end_step(self) -> None:
        """Stop timing the step."""
        self._longest_s = max(self._longest_s, time.monotonic() - self._since_s)

    def fits_another(self, save_s: float = 0.0, left_s: float = 0.0) -> bool:
        """Whether the time left suffices for a step as long as the longest so far, and a checkpoint of `save_s` after
        it.

        The previous checkpoint, which needs `left_s` more, is written during that step, and must finish before the next
        one.
        """
        needed_s = _RESERVE * (max(self._longest_s, left_s) + save_s) + _END_S
        return self._end_s is None or time.time() + needed_s < self._end_s
