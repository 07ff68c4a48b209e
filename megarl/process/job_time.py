"""The time that a job has: whether one more step and a checkpoint fit into what is left of it."""

import time
from collections.abc import Mapping
from typing import Self

_RESERVE = 1.25
"""Times the longest step so far: the next one may take longer, and what it made has to be written."""
_END_S = 60.0
"""To end the processes."""


class JobTime:
    """Measures the steps of a run, and knows when the job that it is in will be ended: at `end_s`, since 1970.

    None is a job without a limit.
    """

    def __init__(self, end_s: float | None = None) -> None:
        self._end_s = end_s
        self._longest_s = 0.0
        self._since_s = time.monotonic()

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """The time of a job of Slurm, which tells its programs from 23.02 on; elsewhere there is no limit."""
        end = environment.get("SLURM_JOB_END_TIME", "")
        return cls(float(end) if end.isdecimal() else None)

    def end_step(self) -> None:
        """Note how long the step took that ends here, with all that lies between it and the one before."""
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self._since_s)
        self._since_s = now

    def fits_another(self) -> bool:
        """Whether there is time for a step as long as the longest so far."""
        return self._end_s is None or time.time() + _RESERVE * self._longest_s + _END_S < self._end_s
