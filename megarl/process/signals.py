"""How a command ends when it is told to: SIGINT, SIGTERM and SIGHUP unwind it in one way, each with its exit code.

SIGINT is Ctrl-C, SIGTERM what Slurm, Kubernetes, systemd and `kill` send, SIGHUP what a terminal sends that goes away.
SIGINT is listened to also where it was ignored at the start, as in the background of a script; SIGHUP is not, since
that is what nohup asks for.
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
"""Sent by what takes the machine away, and not by somebody who has changed their mind."""
_PATIENCE_S = 10.0

Handler = Callable[[int, FrameType | None], Any]


class Interruption:
    """Ends the program by a KeyboardInterrupt when one of its signals comes.

    Signals that come while it ends say nothing new and must not stop it from tidying up. A signal after 10 s interrupts
    again: the user sees that shutdown hangs.
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
        """Whether the program was told to end."""
        return self._number is not None

    @property
    def exit_code(self) -> int:
        """The code by which a shell knows the signal: 130, 143 or 129."""
        return 128 + (self._number or signal.SIGINT)


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Let the signals that end a program raise KeyboardInterrupt inside; in the main thread alone, as Python has it."""
    handler = Interruption()
    with _handled(_wanted(ENDING), handler):
        yield handler


@contextmanager
def held() -> Iterator[None]:
    """Let a signal that comes inside take effect at the end: what is inside is done whole."""
    came: list[int] = []
    try:
        with _handled(_wanted(ENDING), lambda number, _: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


class StopRequest:
    """Whether the run was told to end at the next step boundary, or has no time for another step."""

    def __init__(self, job_time: JobTime) -> None:
        self._number: int | None = None
        self._job_time = job_time

    def __bool__(self) -> bool:
        return self._number is not None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Keep it, and say so."""
        self._number = number
        name = signal.Signals(number).name
        said = f"megarl: {name}: this step is finished and saved, then the run ends; the same again ends it now\n"
        # Not print: the signal may have come in the middle of one.
        os.write(sys.stderr.fileno(), said.encode())

    @property
    def is_limited(self) -> bool:
        """Whether the job has an end, which the run foresees."""
        return self._job_time.is_limited

    def end_step(self) -> None:
        """Note that a step is done."""
        self._job_time.end_step()

    def stops_before_next_step(self, save_s: float = 0.0, left_s: float = 0.0) -> bool:
        """Whether the run ends before the next step, which otherwise begins now.

        A checkpoint takes `save_s`; of one that is being written `left_s` is left.
        """
        if self._number is None and not self._job_time.fits_another(save_s, left_s):
            self._number = signal.SIGTERM
            said = "the job's time is too short for another step: this one is saved, then the run ends"
            print(f"megarl: {said}", file=sys.stderr, flush=True)
        self._job_time.begin_step()
        return bool(self)

    def raise_if_requested(self) -> None:
        """End as the signal says, if there was one or the time is over."""
        if self._number is not None:
            signal.raise_signal(self._number)


@contextmanager
def asked_to_stop(*, waits: bool) -> Iterator[StopRequest]:
    """If it `waits`, delay SIGTERM and SIGHUP to the end of the block, which looks at the request and ends soon.

    The second one takes effect at once. A failure ends what was asked to end. The end of a job's time is foreseen, and
    ends it as SIGTERM does.
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
    """All signals, but without SIGHUP if nohup has it ignored."""
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
