"""Shows a command's progress in bytes."""

import threading
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TimeRemainingColumn, TransferSpeedColumn

from megarl.planning.amounts import say_bytes, say_seconds

_REDRAW_EVERY_S = 0.1
_LINE_EVERY_S, _NO_LINE_FOR_S = 10.0, 1.0
_LINE_EVERY_PERCENT = 10


class ByteProgress:
    """On a terminal a bar with bytes, rate and time left; elsewhere lines; nothing if `quiet`.

    A line is printed every 10 % or 10 s, but at most one per second, all to standard error. Use it as a context
    manager, and call it with the bytes done and the total, as often as you like and from any thread.
    """

    def __init__(
        self, *, quiet: bool, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._quiet, self._clock = quiet, clock
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._first: tuple[int, float] | None = None
        self._last_s, self._next_percent = clock(), _LINE_EVERY_PERCENT

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._bar = Progress(
                BarColumn(bar_width=32),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are done."""
        if self._quiet:
            return
        done = min(done, total)  # FP8 scales are not in the total
        with self._lock:
            now = self._clock()
            if self._bar:
                self._draw(self._bar, done, total, now)
            else:
                self._write(done, total, now)

    def _draw(self, bar: Progress, done: int, total: int, now: float) -> None:
        if now < self._last_s + _REDRAW_EVERY_S and done < total:
            return
        if self._task is None:
            self._task = bar.add_task("", total=total)
        bar.update(self._task, completed=done)
        self._last_s = now

    def _write(self, done: int, total: int, now: float) -> None:
        if self._first is None:
            self._first = (done, now)
        percent = 100 * done // total if total else 100
        since = now - self._last_s
        if since < _NO_LINE_FOR_S or (since < _LINE_EVERY_S and percent < self._next_percent):
            return
        first_done, start = self._first
        words = [f"{say_bytes(done)} of {say_bytes(total)}", f"{percent} %"]
        if done > first_done and now > start:
            rate = (done - first_done) / (now - start)
            words += [f"{say_bytes(rate)}/s", f"{say_seconds((total - done) / rate)} left"]
        self._console.print(", ".join(words))
        self._last_s = now
        self._next_percent = (percent // _LINE_EVERY_PERCENT + 1) * _LINE_EVERY_PERCENT
