"""A limit to what a piece of code that others wrote may take."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CpuTimeSpentError(Exception):
    """The limit is reached."""


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """Raise CpuTimeSpentError inside after so many seconds of the process's own computing: waiting does not count.

    In another thread than the main one, which alone receives signals, there is no limit.
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
