"""Rewrite LaTeX numbers as decimal numbers: fractions, powers of ten and signs."""

import re
from decimal import Decimal

_PLAIN = r"(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
DIGITS = rf"{_PLAIN}(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?"
"""A number without its sign, with an optional exponent."""

_MINUS = "\u2212"
_TIMES = "\\\\times|\\\\cdot|\u00d7|\u22c5|\\*"
_SPACE = r"(?:\s|\\[,;:!> ]|~){0,9}"
_THIN_SPACE = re.compile(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))")
"""The space between groups of three digits."""
_PERCENT = re.compile(rf"\$?{_SPACE}\\?%")
_EXPONENT = r"10\s{0,9}\^\s{0,9}(?:\{\s{0,9}([-+]?[0-9]{1,3})\s{0,9}\}|([-+]?[0-9]{1,3})(?![0-9]))"
_SCALED = re.compile(rf"(?<![0-9.,eE])({_PLAIN}){_SPACE}(?:{_TIMES}|[xX]){_SPACE}{_EXPONENT}")
# Alone, or after a multiplication sign whose left factor is not a number.
_POWER_OF_TEN = re.compile(rf"(?:((?:{_TIMES}){_SPACE})|(?<![0-9.,])){_EXPONENT}")
_BRACED = rf"(?:\{{\s{{0,9}}([-+]?{DIGITS})\s{{0,9}}\}}|\s{{0,9}}([0-9]))"
_FRACTION = re.compile(rf"(?:(?<![0-9.,_^])([0-9]{{1,9}})\s{{0,9}})?\\[dt]?frac\s{{0,9}}{_BRACED}\s{{0,9}}{_BRACED}")
_DEEPEST = 3
_SLASHED = re.compile(rf"\s{{0,9}}([-+]?{DIGITS})\s{{0,9}}/\s{{0,9}}({DIGITS})\s{{0,9}}")
_SIGN_APART = re.compile(r"(^|=)\s{0,9}([-+])[\s\\$]{1,9}(?=[0-9.])")


def ascii_minus(text: str) -> str:
    """Replace Unicode's minus sign by ASCII's."""
    return text.replace(_MINUS, "-")


def join_sign(text: str) -> str:
    """Join a sign to its number, at the beginning and after =; elsewhere it may be a subtraction."""
    return _SIGN_APART.sub(r"\1\2", text)


def boxed_number(box: str) -> str:
    """Rewrite the numbers in a box as decimals: joins signs, and reads a/b as a fraction if it fills the box."""
    text = ascii_minus(box)
    slashed = _SLASHED.fullmatch(join_sign(text))
    return join_sign(decimal_numbers(text if slashed is None else rf"\frac{{{slashed[1]}}}{{{slashed[2]}}}"))


def decimal_numbers(text: str) -> str:
    r"""Rewrite 3 \times 10^{4} as 3e4, \frac{1}{2} as 0.5, 2\frac{1}{2} as 2.5, 1{,}000 as 1,000 and 12\,\% as 12%."""
    text = ascii_minus(text).replace("{,}", ",").replace(r"\!", "")
    text = _PERCENT.sub("%", _THIN_SPACE.sub("", text))
    for _ in range(_DEEPEST):
        # Inner ones first.
        text, fractions = _FRACTION.subn(_quotient, text)
        text, powers = _SCALED.subn(_scaled, text)
        if not fractions + powers:
            break
    return _FRACTION.sub(_quotient, _POWER_OF_TEN.sub(_power_of_ten, text))


def _scaled(power: re.Match[str]) -> str:
    return _apart(f"{power[1]}e{power[2] or power[3]}", power)


def _power_of_ten(power: re.Match[str]) -> str:
    # If the left factor is not a readable number, 10^n alone would be a wrong number: drop it.
    return " " if power[1] else _apart(f"1e{power[2] or power[3]}", power)


def _quotient(fraction: re.Match[str]) -> str:
    whole, *parts = fraction.groups()
    above, below = (Decimal(part.replace(",", "")) for part in parts if part is not None)
    has_sign = fraction.string[: fraction.start()].endswith(("-", "+"))
    if not below or (above < 0 and (has_sign or whole is not None)):
        return " "
    return _apart(str(Decimal(whole or 0) + above / below), fraction)


def _apart(number: str, place: re.Match[str]) -> str:
    """Add blanks to the number where adjacent digits would otherwise merge with it."""
    before, after = place.string[: place.start()][-1:], place.string[place.end() :][:1]
    return f"{' ' * before.isdigit()}{number}{' ' * after.isdigit()}"
