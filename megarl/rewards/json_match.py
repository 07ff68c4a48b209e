"""Rewards for structured output: json_match, json_schema and tool_call."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import dropwhile
from typing import Any

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]
from jsonschema_specifications import REGISTRY as SPECIFICATIONS  # type: ignore[import-untyped]

from megarl.rewards.fenced import last_block
from megarl.rewards.nulls import holds_none

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_DEEPEST = 100
_REFERENCES = ("$ref", "$dynamicRef")
_SCHEMAS_IN: Mapping[str, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys(("additionalProperties", "contains", "contentSchema", "else", "if", "items"), lambda one: [one]),
    **dict.fromkeys(("not", "propertyNames", "then"), lambda one: [one]),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), lambda one: [one]),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), iter),
    **dict.fromkeys(
        ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"), lambda named: named.values()
    ),
}
"""Keyword of JSON Schema that holds schemas -> the schemas in its value. No other keyword holds references."""


def json_match(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
) -> dict[str, float]:
    """Score 1.0 if the response's JSON (see `response_json`) equals the ground truth, else 0.0.

    The ground truth is a value, or JSON text. Numbers are compared by value, and the order of keys does not matter. The
    part "valid" is 1.0 if the response has JSON at all.

    Raises `ValueError` if the ground truth is a text that is not JSON, or a value that contains None: a null is known
    to be intended only in JSON text.
    """
    expected = value_of_truth(ground_truth)
    try:
        found = response_json(solution_str)
    except ValueError:
        return {"score": 0.0, "valid": 0.0}
    return {"score": float(_equal(found, expected)), "valid": 1.0}


def json_schema(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
) -> dict[str, float]:
    """Score 1.0 if the response's JSON (see `response_json`) conforms to the schema in the ground truth, else 0.0.

    The schema is JSON Schema, draft 2020-12. The part "valid" is 1.0 if the response has JSON at all. Raises
    `ValueError` for an invalid schema.
    """
    schema = schema_of_truth(ground_truth)
    try:
        found = response_json(solution_str)
    except ValueError:
        return {"score": 0.0, "valid": 0.0, "unchecked": 0.0}
    return {"score": float(_validator(schema).is_valid(found)), "valid": 1.0, "unchecked": 0.0}


def tool_call(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
) -> dict[str, float]:
    """Score 1.0 if the response makes exactly the expected tool calls, else 0.0.

    A call is {"name": ..., "arguments": {...}}; the ground truth is one call or an ordered list of calls. In the
    response, each call is JSON between <tool_call> and </tool_call>; without these tags, the response's JSON is used
    (see `response_json`). The part "names" is 1.0 if the names are right, whatever the arguments are. Raises
    `ValueError` for a ground truth without such calls.
    """
    expected = calls_of_truth(ground_truth)
    try:
        tagged = [_parse(text) for text in _tagged(solution_str)]
        found = _calls(tagged or response_json(solution_str))
    except ValueError:
        found = None
    if found is None:
        return {"score": 0.0, "names": 0.0}
    names = [name for name, _ in found] == [name for name, _ in expected]
    return {"score": float(names and _equal(found, expected)), "names": float(names)}


def value_of_truth(ground_truth: Any) -> Any:
    """Read a ground truth of json_match. Raises `ValueError` for text that is not JSON, and a value with None."""
    return _truth(ground_truth, "json_match")


def schema_of_truth(ground_truth: Any) -> Any:
    """Read a ground truth of json_schema. Raises `ValueError` if it is not a schema."""
    schema = _truth(ground_truth, "json_schema")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the ground truth of json_schema is no schema: {error.message}") from error
    _check_references(schema)
    return schema


def _validator(schema: Any) -> Draft202012Validator:
    """Build a validator that does not fetch references: by default it reads any file or URL that a schema names."""
    return Draft202012Validator(schema, registry=SPECIFICATIONS)


def _check_references(schema: Any) -> None:
    """Raise `ValueError` if a reference of a schema is dangling, points to no schema, or is circular."""
    references = {*_references(schema)}
    # References in a part with its own $id are relative to that, so they cannot be checked from the root.
    if ("$id", True) in references:
        return
    validator = _validator(schema)
    for key, reference in references:
        try:
            validator.evolve(schema={key: reference}).is_valid(None)
        except Exception as error:
            raise ValueError(
                f"the ground truth of json_schema is no schema: its {key} {reference!r} leads to none ({error})"
            ) from error


def _references(schema: Any, *, is_inner: bool = False) -> Iterator[tuple[str, str | bool]]:
    """Yield (keyword, reference) for the references of a schema, and ("$id", True) for a part with its own $id."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in _REFERENCES and isinstance(value, str):
            yield key, value
        elif key == "$id" and is_inner and isinstance(value, str):
            yield key, True
        for inner in _SCHEMAS_IN[key](value) if key in _SCHEMAS_IN else ():
            yield from _references(inner, is_inner=True)


def calls_of_truth(ground_truth: Any) -> list[tuple[str, Any]]:
    """Read (name, arguments) of each call of a ground truth of tool_call. Raises `ValueError` if there is none."""
    calls = _calls(_truth(ground_truth, "tool_call"))
    if calls is None:
        raise ValueError(f"the ground truth of tool_call must be calls with name and arguments, found {ground_truth!r}")
    return calls


def response_json(text: str) -> Any:
    """Parse the JSON of a response: the last block fenced as json or without a language, else the whole response.

    Raises `ValueError` if it is not JSON (NaN and Infinity are not), or nested more than 100 deep.
    """
    block = last_block(text, ("json",))
    return _parse(text if block is None else block)


def _parse(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse)
        _check_depth(value)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    return value


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise ValueError("the JSON is nested too deeply")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        _check_depth(each, depth + 1)


def _tagged(text: str) -> list[str]:
    """Return the texts between the tags of calls. Raises `ValueError` for an unclosed tag after the first call."""
    parts = [part.partition(_CLOSE) for part in text.split(_OPEN)[1:]]
    # An unclosed tag before the first call is only a mention of the tag.
    calls = list(dropwhile(lambda part: not part[1], parts))
    if not all(close for _, close, _ in calls):
        raise ValueError("a call is not closed")
    return [inside for inside, _, _ in calls]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _truth(ground_truth: Any, reward: str) -> Any:
    if not isinstance(ground_truth, str):
        if holds_none(ground_truth):
            raise ValueError(
                f"the ground truth of {reward} holds None, as a parquet struct has for each key that its row lacks and "
                f"another row has: give it as JSON text, found {ground_truth!r}"
            )
        return ground_truth
    try:
        return json.loads(ground_truth)
    except ValueError as error:
        raise ValueError(f"the ground truth of {reward} is no JSON: {error}, in {ground_truth!r}") from error


def _calls(value: Any) -> list[tuple[str, Any]] | None:
    calls = value if isinstance(value, list) else [value]
    found = []
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or "arguments" not in call:
            return None
        arguments = call["arguments"]
        found.append((call["name"], _parse(arguments) if isinstance(arguments, str) else arguments))
    return found or None


def _equal(found: Any, expected: Any) -> bool:
    """Compare JSON values: unlike in Python, true does not equal 1."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(_equal(found[key], expected[key]) for key in expected)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    return found == expected
