"""Numbers as LaTeX writes them, rewritten as decimal numbers: fractions, powers of ten and signs."""

import re
from decimal import Decimal

DIGITS = r"(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
"""A number without its sign; it may have an exponent."""

_MINUS = "\u2212"
_TIMES = "\\\\times|\\\\cdot|\u00d7|\u22c5|\\*"
_POWER_OF_TEN = re.compile(
    rf"(?:({DIGITS})\s{{0,9}}(?:{_TIMES})\s{{0,9}}|(?<![0-9.,]))10\s{{0,9}}\^\s{{0,9}}"
    r"(?:\{\s{0,9}([-+]?[0-9]{1,3})\s{0,9}\}|([-+]?[0-9]{1,3})(?![0-9]))"
)
_BRACED = rf"(?:\{{\s{{0,9}}([-+]?{DIGITS})\s{{0,9}}\}}|\s{{0,9}}([0-9]))"
_FRACTION = re.compile(rf"(?:(?<![0-9.,])([0-9]{{1,9}})\s{{0,9}})?\\[dt]?frac\s{{0,9}}{_BRACED}\s{{0,9}}{_BRACED}")
_SLASHED = re.compile(rf"\s{{0,9}}([-+]?{DIGITS})\s{{0,9}}/\s{{0,9}}({DIGITS})\s{{0,9}}")
_SIGN_APART = re.compile(r"(^|=)\s{0,9}([-+])[\s\\$]{1,9}(?=[0-9.])")


def ascii_minus(text: str) -> str:
    """The text with the minus sign of ASCII in place of Unicode's."""
    return text.replace(_MINUS, "-")


def join_sign(text: str) -> str:
    """The text with its sign next to the number, at its begin and behind =: elsewhere it may be a subtraction."""
    return _SIGN_APART.sub(r"\1\2", text)


def boxed_number(box: str) -> str:
    """The content of a box, where a sign may stand apart, and a/b is a fraction if it is all that there is."""
    text = join_sign(ascii_minus(box))
    slashed = _SLASHED.fullmatch(text)
    return text if slashed is None else rf"\frac{{{slashed[1]}}}{{{slashed[2]}}}"


def decimal_numbers(text: str) -> str:
    r"""The text with 3e4 in place of 3 \times 10^{4}, 0.5 of \frac{1}{2}, 2.5 of 2\frac{1}{2} and 1,000 of 1{,}000."""
    text = ascii_minus(text).replace("{,}", ",")
    return _FRACTION.sub(_quotient, _POWER_OF_TEN.sub(lambda power: f"{power[1] or 1}e{power[2] or power[3]}", text))


def _quotient(fraction: re.Match[str]) -> str:
    whole, *parts = fraction.groups()
    above, below = (Decimal(part.replace(",", "")) for part in parts if part is not None)
    if not below:
        return " "
    # A digit that is no whole number of it would become its first.
    before = " " if whole is None and fraction.string[: fraction.start()][-1:].isdigit() else ""
    return f"{before}{Decimal(whole or 0) + above / below}"
