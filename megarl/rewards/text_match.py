"""Rewards that compare texts and numbers: exact_match, gsm8k and numeric_match."""

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from megarl.rewards.boxed import last_boxed
from megarl.rewards.latex_numbers import DIGITS, ascii_minus, boxed_number, decimal_numbers, join_sign

_NUMBER = r"\$?(?:[0-9][0-9.,]*|\.[0-9]+)"
_MARKED = re.compile(rf"####(?:\s*(?=-?{_NUMBER})|[ \t]*(?=-[ \t]*{_NUMBER}))((?:-[ \t]*)?{_NUMBER})")
_ANY = re.compile(rf"-?{_NUMBER}")
_MEASURE = re.compile(rf"(?:(?<![0-9])[-+])?{DIGITS}%?")
_POWER = re.compile(r"\^\s{0,9}\{?[-+]?[0-9.]+\}?")
_STATED = re.compile(r"\banswer\b[\s:*]*(.*?)(?:\n|\.\s|$)", re.IGNORECASE | re.DOTALL)
"""The rest of a sentence after the word "answer"."""
_SEARCHED_CHARACTERS = 300


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:  # noqa: ARG001
    """Return 1.0 if the response equals the ground truth, ignoring white space at the ends, else 0.0."""
    return float(solution_str.strip() == str(ground_truth).strip())


def gsm8k(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
    *,
    method: Literal["strict", "flexible"] = "strict",
) -> float:
    """Return 1.0 if the response's final number is the ground truth, else 0.0.

    As verl's `utils/reward_score/gsm8k.py`: "strict" takes the last number after "####", "flexible" the last number
    anywhere, both from the last 300 characters, ignoring commas and dollar signs. Unlike in verl, numbers are compared
    by value, so "18.", "18.00" and "18" are equal; a minus sign may be Unicode's (U+2212), and may be separated from
    the number after "####".

    Raises `ValueError` if the ground truth is not a number.
    """
    expected = gsm8k_truth(ground_truth)
    pattern = {"strict": _MARKED, "flexible": _ANY}[method]
    found = pattern.findall(ascii_minus(solution_str[-_SEARCHED_CHARACTERS:]))
    return float(bool(found) and _as_number(join_sign(found[-1])) == expected)


def gsm8k_truth(ground_truth: Any, **_options: Any) -> Decimal:
    """Read the number of a ground truth. Raises `ValueError` if it is not one."""
    expected = _as_number(ascii_minus(str(ground_truth)))
    if expected is None:
        raise ValueError(f"the ground truth of gsm8k must be a number, found {ground_truth!r}")
    return expected


def numeric_match(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
    *,
    relative: float = 0.0,
    absolute: float = 0.0,
) -> float:
    """Return 1.0 if |found - truth| <= max(relative * |truth|, absolute) for the response's number, else 0.0.

    The number is the last one in the last \\boxed{...}; without a box, in the last sentence with the word "answer";
    without either, in the last 300 characters.

    Numbers may have an exponent (1.5e-3, 1.5 \\times 10^{-3}), a percent sign (12% and 12 % are 0.12), and commas or
    \\, between groups of digits. \\frac{a}{b} is a number, and so is a/b if it fills the box. Exponents after ^ are
    ignored, as in m^2, except for powers of 10. Raises `ValueError` if the ground truth is not a number.
    """
    expected = numeric_truth(ground_truth)
    found = _stated_number(solution_str)
    tolerance = max(Decimal(str(relative)) * abs(expected), Decimal(str(absolute)))
    return float(found is not None and abs(found - expected) <= tolerance)


def numeric_truth(ground_truth: Any, **_options: Any) -> Decimal:
    """Read the number of a ground truth. Raises `ValueError` if it is not one."""
    expected = _as_measure(boxed_number(str(ground_truth)).strip())
    if expected is None:
        raise ValueError(f"the ground truth of numeric_match must be a number, found {ground_truth!r}")
    return expected


def _stated_number(solution: str) -> Decimal | None:
    """Last number of the first place that has one: the box, the sentence with "answer", the end of the text."""
    end = solution[-_SEARCHED_CHARACTERS:]
    places = (boxed_number((last_boxed(solution) or "")[-_SEARCHED_CHARACTERS:]), *_STATED.findall(end)[-1:], end)
    return next((numbers[-1] for place in places if (numbers := _measures(place))), None)


def _measures(text: str) -> list[Decimal]:
    """All numbers in the last `_SEARCHED_CHARACTERS` of a text."""
    read = _POWER.sub(" ", decimal_numbers(text[-_SEARCHED_CHARACTERS:]))
    return [number for each in _MEASURE.findall(read) if (number := _as_measure(each)) is not None]


def check_tolerances(relative: float = 0.0, absolute: float = 0.0) -> None:
    """Raise `ValueError` unless both tolerances are at least 0."""
    if not (relative >= 0 and absolute >= 0):
        raise ValueError(f"relative={relative} and absolute={absolute} must be at least 0")


def _as_measure(text: str) -> Decimal | None:
    number = _as_number(text.removesuffix("%"))
    return number / 100 if number is not None and text.endswith("%") else number


def _as_number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
