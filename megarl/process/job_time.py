"""The time that a job has: whether one more step and a checkpoint fit into what is left of it."""

import time
from collections.abc import Mapping
from typing import Self

_RESERVE = 1.25
"""Times the longest step and the longest checkpoint so far: the next ones may take longer."""
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

    @property
    def is_limited(self) -> bool:
        """Whether the job has an end."""
        return self._end_s is not None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """The time of a job of Slurm, which tells its programs from 23.02 on; elsewhere there is no limit."""
        end = environment.get("SLURM_JOB_END_TIME", "")
        return cls(float(end) if end.isdecimal() else None)

    def begin_step(self) -> None:
        """Note when a step begins; the first one does when this object is made."""
        self._since_s = time.monotonic()

    def end_step(self) -> None:
        """Note how long the step took that ends here."""
        self._longest_s = max(self._longest_s, time.monotonic() - self._since_s)

    def fits_another(self, save_s: float = 0.0, left_s: float = 0.0) -> bool:
        """Whether there is time for a step as long as the longest so far, and for a checkpoint of `save_s` after it.

        The rest of the checkpoint before, `left_s`, is written beside the step, and ends before that one begins.
        """
        needed_s = _RESERVE * (max(self._longest_s, left_s) + save_s) + _END_S
        return self._end_s is None or time.time() + needed_s < self._end_s
