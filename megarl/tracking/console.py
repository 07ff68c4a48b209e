"""Progress on the console: one live line on a terminal, otherwise a plain line at intervals."""

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from megarl.tracking.histogram import MetricValue, numbers
from megarl.tracking.tracker import Logger, Run

_SHOWN: tuple[tuple[str, str, int], ...] = (
    ("reward/mean", "reward {:.3f}", 1),
    ("eval/accuracy", "accuracy {:.3f}", 1),
    ("sft/loss", "loss {:.3f}", 1),
    ("preference/loss", "loss {:.3f}", 1),
    ("preference/accuracy", "accuracy {:.3f}", 1),
    ("sft/exact_match", "exact matches {:.3f}", 1),
    ("spin/exact_match", "exact matches {:.3f}", 1),
    ("preference/eval_accuracy", "held out {:.3f}", 1),
    ("throughput/tokens_per_s", "{:,.0f} tokens/s", 1),
    ("engines/kv_used", "KV cache {:.0%} used", 1),
    # Reported when engines and trainers take turns on shared GPUs.
    ("memory/engines", "in turns: engines {:.2f} GiB", 2**30),
    ("memory/trainers", "trainers {:.2f} GiB", 2**30),
    ("memory/refit", "refit {:.2f} GiB", 2**30),
)
"""Metric, its text, and the displayed unit in units of the metric."""
_PLAIN_LINE_EVERY_S = 5.0

Now = Callable[[], float]


class ProgressText:
    """Text of a progress line: the latest value of each shown metric, and the seconds left.

    The time left follows from the mean step time of this process, so it is unknown until the second log.
    """

    def __init__(self, run: Run, clock: Now) -> None:
        self._last_step, self._clock = run.last_step, clock
        self._values: dict[str, float] = {}
        self._first: tuple[int, float] | None = None

    def update(self, step: int, metrics: Mapping[str, MetricValue]) -> str:
        """Return the line's text after `step`, without the step itself."""
        known = numbers(metrics)
        self._values.update({name: known[name] for name, *_ in _SHOWN if name in known})
        words = [text.format(self._values[name] / unit) for name, text, unit in _SHOWN if name in self._values]
        return "  ".join([*words, *self._time_left(step)])

    def _time_left(self, step: int) -> list[str]:
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, start = self._first
        if step == first_step:
            return []
        seconds = (now - start) / (step - first_step) * (self._last_step - step)
        return [f"{seconds:,.0f} s left"]


class LiveConsole:
    """A single line that is redrawn in place: bar, step, reward, accuracy, tokens/s, seconds left."""

    def __init__(self, run: Run, console: Console, clock: Now = time.monotonic) -> None:
        self._text = ProgressText(run, clock)
        self._progress = Progress(
            BarColumn(bar_width=24),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[text]}"),
            console=console,
        )
        self._task = self._progress.add_task("", total=run.last_step, text="", completed=run.first_step - 1)

    def log(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Redraw the line, which appears with the first log: until then the startup phases are shown."""
        self._progress.start()
        self._progress.update(self._task, completed=step, text=self._text.update(step, metrics))

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002
        """Leave the line's last state on the terminal."""
        self._progress.stop()


class PlainConsole:
    """A line of text at the first and last step, and in between at most one every five seconds."""

    def __init__(self, run: Run, console: Console, clock: Now = time.monotonic) -> None:
        self._text = ProgressText(run, clock)
        self._console, self._clock = console, clock
        self._last_step = run.last_step
        self._next_line_s = clock()

    def log(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Print a line if one is due."""
        text = self._text.update(step, metrics)
        if self._clock() >= self._next_line_s or step == self._last_step:
            self._console.print(f"step {step}/{self._last_step}  {text}", highlight=False, soft_wrap=True)
            self._next_line_s = self._clock() + _PLAIN_LINE_EVERY_S

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: every line has been printed."""


def make_console_logger(run: Run) -> Logger:
    """Return the logger that fits standard output."""
    console = Console()
    return LiveConsole(run, console) if console.is_terminal else PlainConsole(run, console)
