"""Knows every key of the configuration, and suggests for an unknown name which key was probably meant."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin

from converters.errors import UserError, nearest_names
from megarl.config.foreign.slime_flags import SAME
from megarl.config.renamed_keys import (
    ELSEWHERE,
    MEGATRON_LM_ABSENT,
    MEGATRON_LM_FLAGS,
    OWNED,
    VERL,
    VERL_ABSENT,
    VERL_PREFIXES,
)
from megarl.rollout import ENGINES
from megarl.schema import MegarlConfig
from megatron_ext.options.arguments import megatron_fields


def schema_keys(group: type = MegarlConfig, prefix: str = "") -> Iterator[str]:
    """The dotted names of all leaves of the schema."""
    for field in fields(group):
        if isinstance(field.type, type) and is_dataclass(field.type):
            yield from schema_keys(field.type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


@cache
def all_keys() -> tuple[str, ...]:
    """The keys of the schema, of Megatron and of the engines."""
    megatron = (f"megatron.{name}" for name in megatron_fields() if name not in OWNED)
    engine = (f"rollout.engine_args.{name}" for kind in ENGINES.values() for name in kind.arguments())
    return (*schema_keys(), *megatron, *engine)


def check_keys(values: Mapping[Any, Any], group: type = MegarlConfig, prefix: str = "") -> None:
    """Raise UserError for the first key in nested `values` that the schema lacks, or for a value instead of a group."""
    known = {field.name: field.type for field in fields(group)}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in known:
            leaf = _first_leaf(key, value)
            neighbours = [f"{prefix}{each}" for each in known]
            raise UserError(f"configuration key {leaf} does not exist{advice(leaf, neighbours)}")
        _check_value(key, value, known[name])


def _check_value(key: str, value: Any, kind: Any) -> None:
    """Check a value of a schema type: a group, a mapping of groups, or a list of groups; other types have no keys."""
    if isinstance(kind, type) and is_dataclass(kind):
        _check_is_group(key, value, fields(kind)[0].name)
        check_keys(value, kind, f"{key}.")
    elif get_origin(kind) is dict:
        _check_is_group(key, value, "NAME")
        for name, each in value.items():
            _check_value(f"{key}.{name}", each, get_args(kind)[1])
    elif get_origin(kind) is list and isinstance(value, Sequence) and not isinstance(value, str):
        for index, each in enumerate(value):
            _check_value(f"{key}[{index}]", each, get_args(kind)[0])


def _check_is_group(key: str, value: Any, name: str) -> None:
    if not isinstance(value, Mapping):
        raise UserError(f"{key}={value}: {key} is a group of keys; set one of them, such as {key}.{name}=...")


def _first_leaf(key: str, value: Any) -> str:
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def advice(key: str, neighbours: Sequence[str] = ()) -> str:
    """Suggest a replacement of the unknown `key`, as the end of a message; empty if nothing is similar.

    `neighbours` are the keys of its group if the group is an element of a list or has a name chosen by the user.
    """
    absent = next((text for start, text in VERL_ABSENT.items() if f"{key}.".startswith(f"{start}.")), None)
    if absent is not None:
        return f"; it is a key of verl: {absent}"
    if key in VERL:
        return f"; it is a key of verl, here called {VERL[key]}"
    for prefix in sorted(VERL_PREFIXES, key=len, reverse=True):
        if key.startswith(prefix) and (translated := VERL_PREFIXES[prefix] + key.removeprefix(prefix)) in all_keys():
            return f"; it is a key of verl, here called {translated}"
    leaf = key.rpartition(".")[2]
    nearest = [ELSEWHERE[leaf]] if leaf in ELSEWHERE else nearest_names(key, neighbours, at_least=0.75) or _nearest(key)
    return f"; did you mean {' or '.join(nearest)}?" if nearest else ""


def flag_hints() -> dict[str, str]:
    """Flag (with underscores) that is not an option of Megatron -> the end of a message with what to give instead."""
    leaves: dict[str, list[str]] = {}
    for key in schema_keys():
        for name in {key.rpartition(".")[2], key.replace(".", "_")}:
            leaves.setdefault(name, []).append(key)
    hints = {name: f"give it as {' or '.join(f'{key}=...' for key in keys)}" for name, keys in leaves.items()}
    elsewhere = {name: key for name, key in {**SAME, **ELSEWHERE}.items() if name not in hints}
    hints |= {name: f"here it is {_as_given(key)}" for name, key in {**elsewhere, **MEGATRON_LM_FLAGS}.items()}
    return hints | dict(MEGATRON_LM_ABSENT)


def _as_given(key: str) -> str:
    """A key, or the flag that sets it."""
    group, _, option = key.partition(".")
    return f"--{option.replace('_', '-')}" if group == "megatron" else key


def _nearest(key: str) -> list[str]:
    """Keys with the same last part; else one with a similar name in the same group; else one that looks similar."""
    group, _, leaf = key.rpartition(".")
    for keys in (schema_keys(), all_keys()):
        same_leaf = [known for known in keys if known.rpartition(".")[2] == leaf]
        if same_leaf:
            return nearest_names(key, same_leaf, count=2, at_least=0.0)
    known_keys = [*all_keys(), *(_options_of_parts() if group.startswith("algorithm") else [])]
    neighbours = [known for known in known_keys if known.rpartition(".")[0] == group]
    return nearest_names(key, neighbours, at_least=0.75) or nearest_names(key, known_keys)


def _options_of_parts() -> list[str]:
    # Imported here, because most wrong keys do not need it: algorithms work on tensors, and torch takes seconds to
    # import.
    from megarl.algorithms.compatibility import option_keys

    return option_keys()
