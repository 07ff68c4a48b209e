"""Sizes and times as people write and read them."""

import math
import re

from converters.errors import UserError

_UNITS = {"": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
_BY_FOLDED_NAME = {"b": 1, **{unit.lower(): factor for unit, factor in _UNITS.items()}}
_SIZE = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_SAID = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_MINUTE_S, _HOUR_S = 60, 3600


def read_bytes(text: str, option: str) -> int:
    """Parse a size such as `5GB`, `500 MB` or `2GiB` into bytes.

    Raises UserError, naming the `option`, for any other text and for less than one byte.
    """
    match = _SIZE.fullmatch(text)
    if match and match[2].lower() in _BY_FOLDED_NAME:
        nbytes = float(match[1]) * _BY_FOLDED_NAME[match[2].lower()]
        if 1 <= nbytes < math.inf:
            return int(nbytes)
    raise UserError(f"{option} {text} is no size; write it as 5GB, 500MB or 2GiB")


def say_bytes(nbytes: float) -> str:
    """Format a number of bytes with three digits: `1.20 GB`."""
    for unit, factor in _SAID:
        if nbytes >= factor:
            value = nbytes / factor
            return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
    return f"{nbytes:.0f} bytes"


def say_seconds(seconds: float) -> str:
    """Format a time in suitable units: `0.42 s`, `12 s`, `3 min 5 s`, `2 h 10 min`."""
    if seconds < _MINUTE_S:
        return f"{seconds:.{2 if seconds < 10 else 0}f} s"
    if seconds < _HOUR_S:
        return f"{int(seconds) // _MINUTE_S} min {int(seconds) % _MINUTE_S} s"
    return f"{int(seconds) // _HOUR_S} h {int(seconds) % _HOUR_S // _MINUTE_S} min"


def say_count(number: int, noun: str) -> str:
    """Format a number of things whose plural ends in s: `1 file`, `1,200 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
