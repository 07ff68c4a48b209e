"""The reward `math`: mathematical equality, decided by math-verify in processes of its own."""

import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

_CHECKER = Path(__file__).with_name("math_checker.py")


class MathReward:
    """Scores 1.0 where the last mathematical answer of a response equals the ground truth, else 0.0.

    Equality is math-verify's (https://github.com/huggingface/Math-Verify). An answer that could not be compared
    within `timeout_s` seconds, or that crashed the comparison, scores 0.0 and is counted in the part "unchecked".
    May be called from many threads; at most `processes` comparisons (default: one per CPU) run at a time. The
    processes end with the object.
    """

    def __init__(self, timeout_s: float = 10.0, processes: int | None = None) -> None:
        self._timeout_s = timeout_s
        self._places = threading.BoundedSemaphore(processes or os.cpu_count() or 1)
        self._idle: list[subprocess.Popen[str]] = []
        self._end = weakref.finalize(self, _end_all, self._idle)

    def __call__(
        self,
        data_source: str,  # noqa: ARG002
        solution_str: str,
        ground_truth: Any,
        extra_info: Any = None,  # noqa: ARG002
    ) -> dict[str, float]:
        """Return the score and the part "unchecked". Raises `ValueError` if the ground truth cannot be parsed."""
        request = json.dumps({"solution": solution_str, "ground_truth": str(ground_truth)})
        with self._places:
            checker = self._take()
            try:
                reply = _ask(checker, request)
            except BaseException:
                _end_all([checker])
                raise
            if reply is None:
                return {"score": 0.0, "unchecked": 1.0}
            self._idle.append(checker)
        if "error" in reply:
            raise ValueError(reply["error"])
        return {"score": float(reply["correct"]), "unchecked": 0.0}

    def _take(self) -> "subprocess.Popen[str]":
        while self._idle:
            checker = self._idle.pop()
            if checker.poll() is None:
                return checker
            _end_all([checker])
        return _start(self._timeout_s)


def _start(timeout_s: float) -> "subprocess.Popen[str]":
    # -P keeps the folder of the script, and with it this package's own files, off the child's import path. A session
    # of its own keeps Ctrl-C for the parent, whose end closes the child's input.
    checker = subprocess.Popen(
        [sys.executable, "-P", str(_CHECKER), str(timeout_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    assert checker.stdout is not None
    if checker.stdout.readline() != "ready\n":
        raise RuntimeError(f"the process that checks mathematics ended at its start with exit code {checker.wait()}")
    return checker


def _ask(checker: "subprocess.Popen[str]", request: str) -> dict[str, Any] | None:
    """Return the reply, None if a signal (its alarm, a crash, the memory killer) ended the checker over it."""
    assert checker.stdin is not None
    assert checker.stdout is not None
    print(request, file=checker.stdin, flush=True)
    reply = checker.stdout.readline()
    if reply.endswith("\n"):
        return json.loads(reply)
    _end_all([checker])
    if checker.returncode >= 0:
        raise RuntimeError(f"the process that checks mathematics ended with exit code {checker.returncode}")
    return None


def _end_all(checkers: "list[subprocess.Popen[str]]") -> None:
    while checkers:
        with checkers.pop() as checker:  # closes the pipes and waits
            checker.kill()
