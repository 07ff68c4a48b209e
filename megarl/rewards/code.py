"""The reward `code`: runs the unit tests of a response's program in a sandbox."""

import math
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from converters.errors import UserError
from megarl.rewards.fenced import last_block
from megarl.rewards.program_tests import Test, TestCode, read_truth
from megarl.sandbox.run import Finished, Limits, SandboxUnavailableError, run
from megarl.sandbox.users import another_user

_LANGUAGES = ("python", "python3", "py")
_LONGEST_PROGRAM_BYTES = 1024**2
_LONGEST_OUTPUT_BYTES = 1024**2
"""A program may print this many bytes, or twice as many as the right output if that is more."""
_OPEN_FILES = 64
_MIB = 1024**2
_REMEMBERED_TRUTHS = 1024
"""Ground truths of which a process remembers whether they test anything; each takes kilobytes, a data set has many."""


_ISOLATIONS = {
    "namespaces": (
        "run as root or allow user namespaces, or set the option isolation=limits, which keeps programs apart less well"
    ),
    "limits": (
        "as root, programs run as another user, who must be able to read the interpreter: install it outside of homes, "
        "or set the option isolation=namespaces"
    ),
}
"""Isolation -> advice if the machine does not allow it."""


@dataclass(frozen=True)
class CodeOptions:
    """Options of the reward `code`; see there.

    Example: CodeOptions(partial=True, timeout_s=2.0)
    """

    partial: bool = False
    timeout_s: float = 6.0
    memory_mb: int = 512
    processes: int = 8
    file_mb: int = 16
    isolation: str = "namespaces"
    all_tests_s: float = 50.0

    @property
    def limits(self) -> Limits:
        """Limits of each test."""
        return Limits(
            wall_s=self.timeout_s,
            cpu_s=math.ceil(self.timeout_s) + 1,
            memory_bytes=self.memory_mb * _MIB,
            processes=self.processes,
            file_bytes=self.file_mb * _MIB,
            open_files=_OPEN_FILES,
            output_bytes=_LONGEST_OUTPUT_BYTES,
        )

    def check(self) -> None:
        """Check the values, and run an empty program as a test of the sandbox.

        Raises `ValueError` for invalid values, `UserError` if the machine does not allow the isolation or the empty
        program fails.
        """
        if self.isolation not in _ISOLATIONS:
            raise ValueError(f"isolation={self.isolation!r} must be one of {', '.join(_ISOLATIONS)}")
        if self.timeout_s <= 0 or self.memory_mb < 64 or self.processes < 1 or self.file_mb < 2:
            raise ValueError(
                f"timeout_s={self.timeout_s}, memory_mb={self.memory_mb}, processes={self.processes}, "
                f"file_mb={self.file_mb}: these must be above 0 and at least 64, 1 and 2"
            )
        where = f"the reward code cannot be used with isolation={self.isolation} on this machine"
        try:
            another_user()  # every isolation needs it, so the advice to choose another one would not help
        except OSError as error:
            raise UserError(f"{where}: {error} (docs/add_a_reward.md)") from error
        try:
            finished = run("", b"", self.limits, self.isolation)
        except SandboxUnavailableError as error:
            raise UserError(f"{where}: {error}; {_ISOLATIONS[self.isolation]} (docs/add_a_reward.md)") from error
        if (finished.end, finished.code) != ("exited", 0):
            raise UserError(
                f"{where}: an empty program {finished.end.replace('_', ' ')} with code {finished.code}, so all would "
                f"fail; raise timeout_s={self.timeout_s:g} or memory_mb={self.memory_mb}, or "
                f"{_ISOLATIONS[self.isolation]} (docs/add_a_reward.md)"
            )


def code(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
    *,
    partial: bool = CodeOptions.partial,
    timeout_s: float = CodeOptions.timeout_s,
    memory_mb: int = CodeOptions.memory_mb,
    processes: int = CodeOptions.processes,
    file_mb: int = CodeOptions.file_mb,
    isolation: str = CodeOptions.isolation,
    all_tests_s: float = CodeOptions.all_tests_s,
) -> dict[str, float]:
    """Score the Python program in a response's last fenced block: 1.0 if it passes all tests, else 0.0.

    The ground truth is one of these:

    - {"inputs": [...], "outputs": [...]}, texts for stdin and expected on stdout. As in LiveCodeBench, white space
      around lines and around the whole is ignored, and lines of numbers are compared as numbers. With "fn_name", inputs
      are arguments of that function, and outputs its results.
    - A list of {"input": ..., "output": ...}.
    - Either of these as JSON text.
    - Test code that is run after the program, such as asserts.

    With `partial` the score is the share of tests passed; without, the first failed test is the last one that is run.
    Parts: "passed", the share of tests passed; "timed_out", how many tests took longer than `timeout_s` seconds;
    "unchecked", see below. A response without a program scores 0.0.

    Each test is run in its own process, with the limits of the options; see `megarl.sandbox`. Raises `ValueError` for a
    ground truth of another form and for test code that an empty program passes, `SandboxUnavailableError` if the
    machine does not allow the isolation.

    With `partial`, no test is started that might end more than `all_tests_s` seconds after the first one started. If
    tests are left, they count as not passed, and the part "unchecked" is 1.0.
    """
    limits = CodeOptions(partial, timeout_s, memory_mb, processes, file_mb).limits
    program = last_block(solution_str, _LANGUAGES)
    truth = read_truth(ground_truth)
    if program is None or len(program.encode(errors="surrogatepass")) > _LONGEST_PROGRAM_BYTES:
        return {"score": 0.0, "passed": 0.0, "timed_out": 0.0, "unchecked": 0.0}
    passed = timed_out = unchecked = 0
    last_start = time.monotonic() + all_tests_s - timeout_s
    for number, test in enumerate(truth.tests(program)):
        if partial and number and time.monotonic() > last_start:
            unchecked = 1
            break
        finished = _run(test, limits, isolation)
        is_passed = _passes(test, finished)
        passed += is_passed
        timed_out += finished.end == "timed_out"
        if not is_passed and not partial:
            break
    # Only checked if a program passes, since it costs a run: a truth that tests nothing is passed by any program.
    if passed and isinstance(truth, TestCode) and _tests_nothing(truth, limits, isolation):
        raise ValueError(
            "the ground truth of code tests nothing, since a program that does nothing passes it: call what it defines "
            f"(check(name) for HumanEval), found {truth.text[:200]!r}"
        )
    share = passed / truth.count
    score = share if partial else float(passed == truth.count)
    return {"score": score, "passed": share, "timed_out": float(timed_out), "unchecked": float(unchecked)}


def check_options(**options: Any) -> None:
    """Check options of `code`. Raises as `CodeOptions.check`."""
    CodeOptions(**options).check()


def _run(test: Test, limits: Limits, isolation: str) -> Finished:
    limits = replace(limits, output_bytes=max(limits.output_bytes, 2 * test.output_bytes))
    return run(test.program, test.stdin.encode(errors="surrogatepass"), limits, isolation)


def _passes(test: Test, finished: Finished) -> bool:
    return (finished.end, finished.code) == ("exited", 0) and test.is_right(finished.output.decode(errors="replace"))


@lru_cache(_REMEMBERED_TRUTHS)
def _tests_nothing(truth: TestCode, limits: Limits, isolation: str) -> bool:
    """Whether an empty program passes the test code."""
    return all(_passes(test, _run(test, limits, isolation)) for test in truth.tests(""))
