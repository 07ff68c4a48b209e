"""A process that compares mathematical answers: one JSON request per line in, one JSON reply per line out.

It is a program of its own, which imports nothing of megarl, because symbolic mathematics on what a policy wrote can
run forever, fill the memory or crash the interpreter: here the kernel ends it, and the asking process goes on. It
ends by itself when its input is closed.
"""

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_MEMORY_BYTES = 4 * 1024**3


def check(solution: str, ground_truth: str) -> bool:
    """Return whether the last answer in `solution` equals `ground_truth` (LaTeX or a plain expression).

    Raises `ValueError` if the ground truth cannot be parsed. The timeouts of math-verify are off: they rest on a
    signal handler in Python, which cannot interrupt a long computation in C; the caller's alarm can.
    """
    wrapped = ground_truth if "\\boxed" in ground_truth or "$" in ground_truth else f"\\boxed{{{ground_truth}}}"
    gold = _parse(wrapped, [LatexExtractionConfig()]) or _parse(ground_truth, [ExprExtractionConfig()])
    if not gold:
        raise ValueError(f"math-verify cannot parse the ground truth {ground_truth!r}")
    answer = _parse(solution, [LatexExtractionConfig(), ExprExtractionConfig()])
    return verify(gold, answer, timeout_seconds=None)


def _parse(text: str, extraction: Sequence[Any]) -> list[Any]:
    return parse(text, extraction, parsing_timeout=None)


def main(timeout_s: float) -> None:
    """Answer requests until the input ends; a check that takes longer than `timeout_s` kills the process."""
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            reply: dict[str, Any] = {"correct": check(request["solution"], request["ground_truth"])}
        except ValueError as error:
            reply = {"error": str(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
