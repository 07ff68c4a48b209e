"""Measures a command from outside: its seconds, and the anonymous memory of its processes."""

import json
import resource
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_SAMPLE_EVERY_S = 0.05


@dataclass(frozen=True)
class Observation:
    """One run of a command, from its start to its end."""

    seconds: float
    cpu_seconds: float
    """User and system time, including all descendants."""
    peak_anonymous_bytes: int
    """Peak of all its processes together. Memory shared after a fork counts once per process."""
    peak_anonymous_bytes_of_a_process: int
    last_line: dict[str, Any]
    """The JSON of the last line that it printed; empty if there is none."""


class RunFailed(RuntimeError):  # noqa: N818 - says what happened
    """A command failed; the message ends with its last lines."""


def observe(command: Sequence[str], environment: Mapping[str, str]) -> Observation:
    """Run `command` to its end. Raises RunFailed if it fails."""
    with tempfile.TemporaryFile() as errors:
        before, start = _cpu_seconds_of_children(), time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)
        with AnonymousMemory(process.pid) as memory:
            printed, _ = process.communicate()
        seconds = time.perf_counter() - start
        if process.returncode != 0:
            errors.seek(0)
            last = errors.read().decode(errors="replace").splitlines()[-20:]
            raise RunFailed("\n".join([f"{' '.join(command)} ended with {process.returncode}:", *last]))
    lines = printed.decode().splitlines()
    return Observation(
        seconds=seconds,
        cpu_seconds=_cpu_seconds_of_children() - before,
        peak_anonymous_bytes=memory.peak,
        peak_anonymous_bytes_of_a_process=memory.peak_of_a_process,
        last_line=json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {},
    )


def _cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class AnonymousMemory:
    """Peak anonymous and shared memory of a process and its descendants within the context, sampled.

    File pages, which the kernel may drop at any time, are not counted.
    """

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self.peak_of_a_process = 0
        self._root = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "AnonymousMemory":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_EVERY_S):
            with suppress(psutil.NoSuchProcess):
                tree = [self._root, *self._root.children(recursive=True)]
                held = [_anonymous_bytes(process.pid) for process in tree]
                self.peak = max(self.peak, sum(held))
                self.peak_of_a_process = max(self.peak_of_a_process, *held)


def _anonymous_bytes(pid: int) -> int:
    # An ended process has no status, or one without these lines.
    total = 0
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total
