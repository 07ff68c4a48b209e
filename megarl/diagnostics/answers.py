"""Extracts the answer of a response, for majority votes."""

import re

from megarl.rewards.boxed import last_boxed

_MARKED = "####"
_TAGS = ("<answer>", "</answer>")
_ALIKE = (
    (re.compile(r"\\[dt]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"(?<=[0-9])(?:\\!)?(?:,|\{,\}|\\,|\\!)(?:\\!)?(?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"[\s$]+"), ""),
)
"""Spellings and their normal form: fractions, thousands separators, and white space."""


def answer_of(text: str) -> str:
    """Return the normalized answer of a response; equal texts are one vote.

    Kinds of answers are tried in this order, and the last answer of the first kind found counts: \\boxed{...},
    <answer>...</answer>, the rest of a line after "####", or else the whole text. Case, white space, dollar signs, a
    final period, thousands separators and the size of a fraction are ignored.
    """
    found = next((answer for find in (last_boxed, _tagged, _marked) if (answer := find(text)) is not None), text)
    for spelling, stands_for in _ALIKE:
        found = spelling.sub(stands_for, found)
    return found.rstrip(".").casefold()


def _tagged(text: str) -> str | None:
    opening, closing = _TAGS
    end = text.rfind(closing)
    start = text.rfind(opening, 0, max(end, 0))
    return text[start + len(opening) : end] if start >= 0 else None


def _marked(text: str) -> str | None:
    _, marker, rest = text.rpartition(_MARKED)
    return rest.strip().partition("\n")[0] if marker else None
