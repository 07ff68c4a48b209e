"""The reward `math`: mathematical equality, decided by math-verify."""

import logging
import re
from collections.abc import Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import FiniteSet  # type: ignore[import-untyped]

from megarl.rewards.boxed import last_boxed

# It warns at every call with its own timeouts turned off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LATEX, _PLAIN = LatexExtractionConfig(), ExprExtractionConfig()
_UNITS = re.compile(r"\\?%|\\\$")
_COMMAND, _WORD = re.compile(r"\\[A-Za-z]+"), re.compile(r"\w")
_READ_CHARACTERS = 2000
"""Limit of what is parsed of a response without a box, or of a box: parsing may take quadratic time."""


def math(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
) -> dict[str, float]:
    """Score 1.0 if the answer of a response equals the ground truth, else 0.0.

    The answer is the last \\boxed{...} that is not empty; without one, the last mathematical expression in the last
    2,000 characters. If the ground truth has several elements, adjacent boxes count as one answer. Percent and dollar
    signs are ignored on both sides.

    Equality is decided by math-verify (https://github.com/huggingface/Math-Verify). The ground truth is LaTeX or a
    plain expression. Raises `ValueError` if it cannot be parsed. math-verify's own timeouts are off: they rely on a
    Python signal handler, which cannot interrupt a long computation in C. Killing this process can.
    """
    gold, content = parse_truth(ground_truth), last_boxed(solution_str)
    answers = [] if content is None else [_boxed(content)]
    if content is None or _has_several(gold):
        answers.append(_parse(_without_units(solution_str[-_READ_CHARACTERS:]), [_LATEX, _PLAIN]))
    return {"score": float(any(verify(gold, each, timeout_seconds=None) for each in answers)), "unchecked": 0.0}


def parse_truth(ground_truth: Any) -> list[Any]:
    """Parse a ground truth. Raises `ValueError` if it has no mathematical expression."""
    truth = _without_units(str(ground_truth))
    wrapped = truth if "\\boxed" in truth or "$" in truth else f"\\boxed{{{truth}}}"
    gold = _parse(wrapped, [_LATEX]) or _parse(truth, [_PLAIN])
    if not gold:
        raise ValueError(f"math-verify cannot parse the ground truth {str(ground_truth)!r}")
    return gold


def check_truth(ground_truth: Any) -> None:
    """Raise `ValueError` for a ground truth without a mathematical expression.

    Parses only suspicious ones, since parsing 100,000 expressions takes minutes.
    """
    truth = _without_units(str(ground_truth)).strip()
    is_plain = _WORD.search(_COMMAND.sub("", truth)) is not None and last_boxed(f"\\boxed{{{truth}}}") == truth
    if not is_plain or "$" in truth:
        parse_truth(ground_truth)


def _boxed(content: str) -> list[Any]:
    """Parse the content of a box; [] if it is too long to be an answer."""
    if len(content) > _READ_CHARACTERS:
        return []
    return _parse(f"\\boxed{{{_without_units(content).rstrip(' .')}}}", [_LATEX])


def _has_several(parsed: Sequence[Any]) -> bool:
    return isinstance(parsed[0], FiniteSet) and len(parsed[0]) > 1


def _without_units(text: str) -> str:
    return _UNITS.sub("", text)


def _parse(text: str, extraction: Sequence[Any]) -> list[Any]:
    return parse(text, extraction, parsing_timeout=None)
