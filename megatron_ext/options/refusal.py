"""Refused values of options, each with a reason."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from converters.errors import UserError

_OFF = (None, False)


class Refusal(NamedTuple):
    """The refused values of an option, and why."""

    reason: str
    allowed: tuple[Any, ...] = _OFF
    """All other values are refused. A list is allowed if all of its items are, a mapping if all of its keys are."""
    at_least: float | None = None
    """Numbers of at least this value are allowed, too."""

    def covers(self, value: Any) -> bool:
        """Whether this value is refused."""
        values = value if isinstance(value, list | dict) else [value]
        return not all(each in self.allowed or self._is_large_enough(each) for each in values)

    def _is_large_enough(self, value: Any) -> bool:
        return self.at_least is not None and isinstance(value, int | float) and value >= self.at_least

    @property
    def others(self) -> str:
        """The allowed values other than null and false, in words."""
        named = [str(each) for each in self.allowed if each not in _OFF or (each == 0 and each is not False)]
        return " or ".join(named if self.at_least is None else [*named, f"{self.at_least:g} or more"])


def refuse(options: Mapping[str, Any], refused: Mapping[str, Refusal], prefix: str, where: str = "") -> None:
    """Raise UserError for the first option whose value is refused; `where` names the case in it, such as " with X"."""
    for name, value in options.items():
        if name in refused and refused[name].covers(value):
            advice = f"use {refused[name].others}" if refused[name].others else "leave it out"
            raise UserError(f"{prefix}{name}={value} is not supported{where}: {refused[name].reason}; {advice}")
