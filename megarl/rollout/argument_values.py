"""Valid values of engine arguments, as data: checked before anything starts, even without the engine installed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from converters.errors import UserError, did_you_mean
from megatron_ext.options.dataclass_fields import FieldType

PREFIX = "rollout.engine_args."


@dataclass(frozen=True)
class Values:
    """The valid values of an argument: a type, and for numbers their bounds."""

    type: FieldType
    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf

    @property
    def or_null(self) -> "Values":
        """The same values, or null."""
        return replace(self, type=self.type | FieldType(frozenset({"None"})))

    def check(self, name: str, value: Any) -> None:
        """Raise UserError if `value` is not valid for the engine argument `name`."""
        check_type(name, value, self.type)
        if isinstance(value, int | float) and not (self.above < value and self.at_least <= value <= self.at_most):
            raise UserError(f"{PREFIX}{name}={value} cannot be: it must be {self._bounds}")

    @property
    def _bounds(self) -> str:
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most}
        return " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if math.isfinite(bound))


SIZE = Values(FieldType(frozenset({"int"})), at_least=1)
SHARE = Values(FieldType(frozenset({"float"})), above=0, at_most=1)
SWITCH = Values(FieldType(frozenset({"bool"})))
DTYPE = Values(FieldType(choices=("auto", "half", "float16", "bfloat16", "float", "float32")))
"""The dtype of weights, by vLLM's names, which other engines share."""


def check_values(given: Mapping[str, Any], declared: Mapping[str, Values], known: Mapping[str, FieldType]) -> None:
    """Raise UserError for the first argument with an invalid value.

    An argument is checked against its `declared` values, or else against its type, `known` from the engine's own class.
    """
    for name, value in given.items():
        if name in declared:
            declared[name].check(name, value)
        elif name in known and not known[name].is_open and known[name].enum is None:
            check_type(name, value, known[name])


def check_type(name: str, value: Any, kind: FieldType) -> None:
    """Raise UserError if a value is not of this type."""
    try:
        kind.convert(value)
    except ValueError as error:
        words = [choice for choice in kind.choices if isinstance(choice, str)]
        raise UserError(f"{PREFIX}{name}={value} cannot be: it {error}{did_you_mean(str(value), words)}") from error
    if isinstance(value, float) and "float" not in kind.kinds:
        raise UserError(f"{PREFIX}{name}={value} cannot be: it takes {kind}, without a decimal point")
