"""Values of options that cannot be used, each with its reason."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from converters.errors import UserError

_OFF = (None, False)


class Refusal(NamedTuple):
    """Values of an option that cannot be used, and why."""

    reason: str
    allowed: tuple[Any, ...] = _OFF
    """All others are refused; a list is allowed where each of its items is, a table where each of its keys is."""

    def covers(self, value: Any) -> bool:
        """Whether this value is refused."""
        values = value if isinstance(value, list | dict) else [value]
        return any(each not in self.allowed for each in values)

    @property
    def others(self) -> str:
        """The allowed values beside null and false, in words."""
        return " or ".join(str(each) for each in self.allowed if each not in _OFF or (each == 0 and each is not False))


def refuse(options: Mapping[str, Any], refused: Mapping[str, Refusal], prefix: str, where: str = "") -> None:
    """Raise UserError for the first of the options whose value is refused, `where` says in which case."""
    for name, value in options.items():
        if name in refused and refused[name].covers(value):
            advice = f"use {refused[name].others}" if refused[name].others else "leave it out"
            raise UserError(f"{prefix}{name}={value} is not supported{where}: {refused[name].reason}; {advice}")
