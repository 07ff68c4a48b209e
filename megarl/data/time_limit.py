"""A CPU time limit for third-party code."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CpuTimeSpentError(Exception):
    """The CPU time limit is reached."""


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """Raise CpuTimeSpentError in the block after `seconds` of CPU time of this process; waiting does not count.

    Sets no limit outside of the main thread, since only that receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGVTALRM, _raise)
    left, _ = signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)
        signal.setitimer(signal.ITIMER_VIRTUAL, left)


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise CpuTimeSpentError
