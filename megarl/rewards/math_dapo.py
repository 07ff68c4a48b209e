"""The reward `math_dapo`: compares the last "Answer: ..." line as text, like verl's function of the same name."""

import re
from collections.abc import Sequence
from typing import Any

_SEARCHED_CHARACTERS = 300
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_NO_ANSWER = "[INVALID]"

_REPLACED: Sequence[tuple[str, str]] = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_REWRITTEN: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
        (r"(\\text\{)(.*?)(\})", r"\2"),
        (r"(\\textbf\{)(.*?)(\})", r"\2"),
        (r"(\\overline\{)(.*?)(\})", r"\2"),
        (r"(\\boxed\{)(.*)(\})", r"\2"),
        (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
        (r"(sqrt)([^{])", r"sqrt{\2}"),
    )
)
"""Applied in order: unwrap $...$, unwrap commands, add missing braces of \\frac and \\sqrt."""


def math_dapo(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:  # noqa: ARG001
    """Return 1.0 if the last "Answer: ..." in the last 300 characters is the ground truth, else 0.0.

    Decides as verl's `utils/reward_score/math_dapo.py`, which returns 1 and -1. Both sides are normalized as there
    (removing units, dollar signs, \\text, \\boxed and everything up to the last =) and compared as text. So 0.5 is not
    1/2, and a box alone, or a response that was cut off, is no answer.
    """
    answers = _ANSWER.findall(solution_str[-_SEARCHED_CHARACTERS:])
    return float(_normalised(answers[-1] if answers else _NO_ANSWER) == _normalised(str(ground_truth)))


def _normalised(answer: str) -> str:
    answer = answer.rpartition("=")[2]
    for before, after in (*_REPLACED, *((each, "") for each in _REMOVED)):
        answer = answer.replace(before, after)
    for pattern, text in _REWRITTEN:
        answer = pattern.sub(text, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()
