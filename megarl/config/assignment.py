"""Overrides in Hydra's grammar, and where each was given."""

import re
from dataclasses import dataclass

_PLAIN_VALUE = re.compile(r"[\w./:+\-]+|\[.*\]|\{.*\}|'.*'|\".*\"")


@dataclass(frozen=True)
class Assignment:
    """An override, and where it was given."""

    text: str
    origin: str

    @property
    def key(self) -> str:
        """The key that it gives a value to."""
        return self.text.partition("=")[0].lstrip("+~")


def override(key: str, value: object) -> str:
    """A Hydra override that gives `key` exactly this value."""
    text = str(value)
    if _PLAIN_VALUE.fullmatch(text):
        return f"{key}={text}"
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"
