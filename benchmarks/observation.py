"""Measures the steps of a training run from outside, timed by the lines that are added to metrics.jsonl.

Anything that writes {"step": n, "seconds/<stage>": s, "throughput/tokens_per_s": t, ...} at the end of each step can be
measured, without any changes to the run.
"""

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from process_tree import PeakMemory, ProcessTree

from megarl.tracking import read_history
from megarl.tracking.jsonl import FILE_NAME

_POLL_S = 0.01


@dataclass(frozen=True)
class Window:
    """The steps that are measured: `steps` steps after the first `warm_up` ones."""

    warm_up: int
    steps: int

    @property
    def run_steps(self) -> int:
        """Steps of the whole run: one extra, so that work after the last step is outside the window."""
        return self.warm_up + self.steps + 1


@dataclass(frozen=True)
class Observation:
    """One run. Everything is of the steps in the window, except `peak_memory_bytes`, which is of the whole run."""

    cpu_seconds_per_step: float
    wall_seconds_per_step: float
    tokens_per_step: float
    tokens_per_s: float
    reward_mean: float
    stage_seconds: dict[str, float]
    """Median wall time of each stage."""
    peak_memory_bytes: int


@dataclass(frozen=True)
class _StepEnd:
    wall_s: float
    cpu_s: float


class RunFailed(RuntimeError):  # noqa: N818 - says what happened
    """A watched run failed; the message ends with its last lines."""


def observe(command: Sequence[str], environment: Mapping[str, str], output_dir: Path, window: Window) -> Observation:
    """Run `command`, which writes `output_dir`/metrics.jsonl, to its end. Raises RunFailed if it fails."""
    output_dir.mkdir(parents=True)
    log = output_dir / "output.log"
    with log.open("wb") as file:
        # In a separate session, so that an interrupt reaches it only once, from here.
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        step_ends, peak_memory_bytes = _watch(process, output_dir / FILE_NAME)
    finally:
        if process.poll() is None:
            process.terminate()  # SIGINT may be ignored, as in the background of a script
            process.wait()
    if process.returncode != 0:
        last = log.read_text(errors="replace").splitlines()[-20:]
        raise RunFailed("\n".join([f"{' '.join(command)} ended with {process.returncode}:", *last]))
    return _summarise(step_ends, peak_memory_bytes, output_dir, window)


def _watch(process: subprocess.Popen[bytes], metrics: Path) -> tuple[list[_StepEnd], int]:
    """The ends of steps 1, 2, ... and the peak memory seen, until the process ends."""
    tree = ProcessTree(process.pid)
    step_ends: list[_StepEnd] = []
    with PeakMemory(tree) as peak_memory:
        while process.poll() is None:
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if lines > len(step_ends):
                end = _StepEnd(time.monotonic(), tree.cpu_seconds())
                step_ends += [end] * (lines - len(step_ends))
            time.sleep(_POLL_S)
    return step_ends, peak_memory.bytes


def _summarise(step_ends: Sequence[_StepEnd], peak_memory_bytes: int, output_dir: Path, window: Window) -> Observation:
    history = read_history(output_dir)[window.warm_up : window.warm_up + window.steps]
    start, stop = step_ends[window.warm_up - 1], step_ends[window.warm_up + window.steps - 1]
    tokens = sum(line["throughput/tokens_per_s"] * line["seconds/step"] for line in history)
    stages = [name for name in history[0] if name.startswith("seconds/")]
    return Observation(
        cpu_seconds_per_step=(stop.cpu_s - start.cpu_s) / window.steps,
        wall_seconds_per_step=(stop.wall_s - start.wall_s) / window.steps,
        tokens_per_step=tokens / window.steps,
        tokens_per_s=tokens / (stop.wall_s - start.wall_s),
        reward_mean=sum(line["reward/mean"] for line in history) / window.steps,
        stage_seconds={
            name.removeprefix("seconds/"): median(line.get(name, 0.0) for line in history) for name in stages
        },
        peak_memory_bytes=peak_memory_bytes,
    )
