"""How a command ends on SIGINT, SIGTERM and SIGHUP: each unwinds it in the same way, with its own exit code.

SIGINT comes from Ctrl-C, SIGTERM from Slurm, Kubernetes, systemd and `kill`, SIGHUP from a terminal that is closed.
SIGINT is handled even if it was ignored at the start, as in a script's background jobs. An ignored SIGHUP stays
ignored, since nohup asks for that.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from megarl.process.errors import Resumable
from megarl.process.job_time import JobTime

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REQUEUEING = (signal.SIGTERM, signal.SIGHUP)
"""Signals sent when the machine is taken away, as opposed to a user's Ctrl-C."""
_PATIENCE_S = 10.0

Handler = Callable[[int, FrameType | None], Any]


class Interruption:
    """Ends the program with a KeyboardInterrupt at its first signal.

    Signals during the shutdown are ignored, so that they do not interrupt the cleanup. After 10 s a signal interrupts
    again, as shutdown seems to hang.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._since_s = 0.0

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt."""
        now = time.monotonic()
        if self._number is not None and now < self._since_s + _PATIENCE_S:
            return
        self._number, self._since_s = number, now
        raise KeyboardInterrupt

    @property
    def has_come(self) -> bool:
        """Whether a signal has come."""
        return self._number is not None

    @property
    def exit_code(self) -> int:
        """The shell's exit code for the signal: 130, 143 or 129."""
        return 128 + (self._number or signal.SIGINT)


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Let signals that end a program raise KeyboardInterrupt inside; in the main thread only, as Python requires."""
    handler = Interruption()
    with _handled(_wanted(ENDING), handler):
        yield handler


@contextmanager
def held() -> Iterator[None]:
    """Delay signals that come inside to the end of the context, so that its work completes."""
    came: list[int] = []
    try:
        with _handled(_wanted(ENDING), lambda number, _: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


class StopRequest:
    """Whether the run was asked to end at the next step boundary, or has no time for another step."""

    def __init__(self, job_time: JobTime) -> None:
        self._number: int | None = None
        self._job_time = job_time

    def __bool__(self) -> bool:
        return self._number is not None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Record the signal, and print that the run will end."""
        self._number = number
        name = signal.Signals(number).name
        said = f"megarl: {name}: this step is finished and saved, then the run ends; the same again ends it now\n"
        # Not print, which the signal may have interrupted.
        os.write(sys.stderr.fileno(), said.encode())

    @property
    def is_limited(self) -> bool:
        """Whether the job has a time limit."""
        return self._job_time.is_limited

    def end_step(self) -> None:
        """Record the end of a step."""
        self._job_time.end_step()

    def stops_before_next_step(self, save_s: float = 0.0, left_s: float = 0.0) -> bool:
        """Whether the run must end before the next step, whose time is counted from this call.

        A checkpoint takes `save_s`; one that is being written needs `left_s` more.
        """
        if self._number is None and not self._job_time.fits_another(save_s, left_s):
            self._number = signal.SIGTERM
            said = "the job's time is too short for another step: this one is saved, then the run ends"
            print(f"megarl: {said}", file=sys.stderr, flush=True)
        self._job_time.begin_step()
        return bool(self)

    def raise_if_requested(self) -> None:
        """Raise the signal, if one has come or the job's time is up."""
        if self._number is not None:
            signal.raise_signal(self._number)


@contextmanager
def asked_to_stop(*, waits: bool) -> Iterator[StopRequest]:
    """If it `waits`, delay SIGTERM and SIGHUP to the end of the block, which checks the request and ends soon.

    A second signal takes effect at once. A run that fails after a signal is not resumed. The end of a job's time limit
    acts as a SIGTERM.
    """
    if not waits or threading.current_thread() is not threading.main_thread():
        yield StopRequest(JobTime())
        return
    request = StopRequest(JobTime.of(os.environ))
    before = {number: signal.getsignal(number) for number in _wanted(REQUEUEING)}

    def once(number: int, frame: FrameType | None) -> None:
        _install(before)
        request(number, frame)

    try:
        with _handled(list(before), once):
            yield request
    except Resumable as failure:
        if request:
            failure.may_resume = False
        raise
    request.raise_if_requested()


def _wanted(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """All of `numbers`, without a SIGHUP that nohup has set to be ignored."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


@contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        _install(before)


def _install(handlers: "dict[signal.Signals, Any]") -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
