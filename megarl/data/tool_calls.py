"""Tool calls of a message: their arguments as templates take them, and their functions."""

import json
from collections.abc import Mapping
from typing import Any

from converters.errors import UserError


class Arguments(dict[str, Any]):
    """Arguments of a call, given as JSON text: a mapping for templates that read one, the text for those that write it.

    vLLM and SGLang hand templates mappings, too, when they serve a model.
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
    """Arguments of a call as templates take them; an empty text says that there are none."""
    if not isinstance(value, str):
        return value
    try:
        arguments = json.loads(value.strip() or "{}")
    except (ValueError, RecursionError):
        return value
    return Arguments(arguments, value) if isinstance(arguments, dict) else value


def function_of(call: Any, where: str) -> Mapping[str, Any]:
    """Name and arguments of a call, whether in a mapping of their own or not."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(
            f"{where}: its 'tool_calls' must be a list of {{function: {{name, arguments}}}}, found {call!r}"
        )
    return function


def with_function(call: Mapping[str, Any], function: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call of this function in place of its own, in its id, too, which Kimi-K2 writes for the name: functions.f:0."""
    if "function" not in call:
        return function
    changed = {**call, "function": function}
    if isinstance(call.get("id"), str):
        changed["id"] = call["id"].replace(f".{call['function']['name']}:", f".{function['name']}:")
    return changed
