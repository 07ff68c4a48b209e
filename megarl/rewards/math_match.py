"""The reward `math`: mathematical equality, decided by math-verify."""

import logging
from collections.abc import Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# It warns of every call without its own timeouts.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
) -> dict[str, float]:
    """Score 1.0 where the last mathematical answer of a response equals the ground truth, else 0.0.

    Equality is math-verify's (https://github.com/huggingface/Math-Verify); the ground truth is LaTeX or a plain
    expression. Raises `ValueError` if it cannot be parsed. The timeouts of math-verify are off: they rest on a signal
    handler in Python, which cannot interrupt a long computation in C; the end of this process can.
    """
    truth = str(ground_truth)
    wrapped = truth if "\\boxed" in truth or "$" in truth else f"\\boxed{{{truth}}}"
    gold = _parse(wrapped, [LatexExtractionConfig()]) or _parse(truth, [ExprExtractionConfig()])
    if not gold:
        raise ValueError(f"math-verify cannot parse the ground truth {truth!r}")
    answer = _parse(solution_str, [LatexExtractionConfig(), ExprExtractionConfig()])
    return {"score": float(verify(gold, answer, timeout_seconds=None)), "unchecked": 0.0}


def _parse(text: str, extraction: Sequence[Any]) -> list[Any]:
    return parse(text, extraction, parsing_timeout=None)
