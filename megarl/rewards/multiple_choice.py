"""The reward `multiple_choice`: the option that a response chooses."""

import re
from typing import Any

_STATED = re.compile(
    r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Z])\)?\s*\}?\s*\}"  # \boxed{B}, \boxed{\text{(B)}}
    r"|(?i:\b(?:answer|choice|option))(?:\*\*)?\s{0,4}(?:(?i:is|should be|would be|must be))?\s{0,4}:?\s{0,4}"
    r"(?:\*\*)?\s{0,4}(?i:option\s{1,4})?[\(\[\"'`]?([A-Z])(?![A-Za-z'])"  # Answer: B, the answer is **(B)**
)
_BRACKETED = re.compile(r"[\(\[]([A-Z])[\)\]]")
_ALONE = re.compile(r"^[\s*]*([A-Z])[\s*]*[.):]?[\s*]*$", re.MULTILINE)
_SEARCHED_CHARACTERS = 2000


def multiple_choice(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
    *,
    options: str = "ABCD",
) -> float:
    """Return 1.0 where the option that the response states last is the ground truth, a letter of `options`.

    The last 2,000 characters count, and in them, in this order: \\boxed{B} and "answer: B" or "the answer is (B)"; else
    a letter in brackets, "(B)"; else a letter that is alone in its line. Raises `ValueError` if the ground truth is no
    option.
    """
    return float(right_option(ground_truth, options) == chosen_option(solution_str, options))


def right_option(ground_truth: Any, options: str = "ABCD") -> str:
    """The option that a ground truth is. Raises `ValueError` if it is none."""
    expected = str(ground_truth).strip().strip("().").upper()
    if len(expected) != 1 or expected not in options:
        raise ValueError(f"the ground truth of multiple_choice must be one of {options}, found {ground_truth!r}")
    return expected


def chosen_option(text: str, options: str) -> str | None:
    """The option that a text states last, None if it states none."""
    tail = text[-_SEARCHED_CHARACTERS:]
    for form in (_STATED, _BRACKETED, _ALONE):
        found = [letter for match in form.finditer(tail) for letter in match.groups() if letter and letter in options]
        if found:
            return found[-1]
    return None


def check_options(options: str = "ABCD") -> None:
    """Raise `ValueError` for options that are no capital letters."""
    if not options or not re.fullmatch("[A-Z]+", options):
        raise ValueError(f"options={options!r} must be capital letters, such as ABCDE")
