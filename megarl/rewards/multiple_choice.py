"""The reward `multiple_choice`: the option that a response chooses."""

import re
from typing import Any

from megarl.rewards.boxed import last_boxed

_WRAPPED = r"(?:[\s(\[\"'`$*]|\\[A-Za-z]{1,9}\s?\{){0,9}"
"""Brackets, quotes, bold type and LaTeX before a letter, such as `**(` or `$\\mathrm{`."""
_OPTION = rf"{_WRAPPED}(?i:option\s{{1,4}})?{_WRAPPED}([A-Z])(?![A-Za-z'])(?!(?<=[AI])\s+(?!because|since|as\b)[a-z])"
"""A letter that is not a word: "A" and "I" may begin a sentence."""
_IN_BOX = re.compile(_OPTION)
_FORMS = (
    # Answer: B, the answer is **(B)**
    re.compile(rf"(?i:\banswer)(?:\*\*)?\s{{0,4}}(?i:is|should be|would be|must be)?\s{{0,4}}:?{_OPTION}"),
    re.compile(rf"(?i:\b(?:choice|option))(?:\*\*)?\s{{0,4}}(?i:is|should be|would be|must be)?\s{{0,4}}:?{_OPTION}"),
    re.compile(r"[\(\[]([A-Z])[\)\]]"),
    re.compile(r"^[\s*]*([A-Z])[\s*]*[.):]?[\s*]*$", re.MULTILINE),
)
_SEARCHED_CHARACTERS = 2000


def multiple_choice(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
    *,
    options: str = "ABCD",
) -> float:
    """Return 1.0 if the option that the response states last is the ground truth, a letter of `options`, else 0.0.

    Searches the last 2,000 characters for these forms, in this order: \\boxed{B}; "answer: B" or "the answer is (B)";
    "option B"; a letter in brackets, "(B)"; a letter alone on its line. Text may follow all but the last. Raises
    `ValueError` if the ground truth is not an option.
    """
    return float(right_option(ground_truth, options) == chosen_option(solution_str, options))


def right_option(ground_truth: Any, options: str = "ABCD") -> str:
    """Read the option of a ground truth. Raises `ValueError` if it is none of `options`."""
    expected = str(ground_truth).strip().strip("().").upper()
    if len(expected) != 1 or expected not in options:
        raise ValueError(f"the ground truth of multiple_choice must be one of {options}, found {ground_truth!r}")
    return expected


def chosen_option(text: str, options: str) -> str | None:
    """Find the option that a text states last; None if it states none."""
    tail = text[-_SEARCHED_CHARACTERS:]
    boxed = _IN_BOX.match(last_boxed(tail) or "")
    if boxed and boxed[1] in options:
        return boxed[1]
    for form in _FORMS:
        found = [match[1] for match in form.finditer(tail) if match[1] in options]
        if found:
            return found[-1]
    return None


def check_options(options: str = "ABCD") -> None:
    """Raise `ValueError` unless `options` are capital letters."""
    if not options or not re.fullmatch("[A-Z]+", options):
        raise ValueError(f"options={options!r} must be capital letters, such as ABCDE")
