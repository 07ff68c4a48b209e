"""Tool calls of a message: their functions, and arguments in a form that all templates accept."""

import json
from collections.abc import Mapping
from typing import Any

from converters.errors import UserError


class Arguments(dict[str, Any]):
    """Arguments of a call that were given as JSON text: a mapping that renders as the original text.

    Some templates iterate over a mapping, others write the text. vLLM and SGLang pass mappings, too, when serving.
    """

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return repr(self._text)

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def read_arguments(value: Any) -> Any:
    """Parse arguments given as JSON text to `Arguments`; "" is no arguments. Anything else is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        arguments = json.loads(value.strip() or "{}")
    except (ValueError, RecursionError):
        return value
    return Arguments(arguments, value) if isinstance(arguments, dict) else value


def function_of(call: Any, where: str) -> Mapping[str, Any]:
    """Return the mapping with name and arguments of a call: its "function", or the call itself.

    Raises UserError if it has no name.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(
            f"{where}: its 'tool_calls' must be a list of {{function: {{name, arguments}}}}, found {call!r}"
        )
    return function


def with_function(call: Mapping[str, Any], function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the function of a call, also in its id, which Kimi-K2 writes instead of the name: functions.f:0."""
    if "function" not in call:
        return function
    changed = {**call, "function": function}
    if isinstance(call.get("id"), str):
        changed["id"] = call["id"].replace(f".{call['function']['name']}:", f".{function['name']}:")
    return changed
