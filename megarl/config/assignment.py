"""Overrides in Hydra's grammar, with the place where each was given."""

import re
from dataclasses import dataclass

_PLAIN_VALUE = re.compile(r"[\w./:+\-]+|\[.*\]|\{.*\}|'.*'|\".*\"")


@dataclass(frozen=True)
class Assignment:
    """An override, and the place where it was given."""

    text: str
    origin: str

    @property
    def key(self) -> str:
        """The key that it sets."""
        return self.text.partition("=")[0].lstrip("+~")


def override(key: str, value: object) -> str:
    """Return a Hydra override that sets `key` to exactly this value."""
    if isinstance(value, list):
        return f"{key}=[{','.join(_quoted(each) if isinstance(each, str) else str(each) for each in value)}]"
    text = str(value)
    return f"{key}={text if _PLAIN_VALUE.fullmatch(text) else _quoted(text)}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
