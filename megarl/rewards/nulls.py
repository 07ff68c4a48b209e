"""None in values read from parquet: a struct has every key that any row has, with None if its own row lacks it."""

from collections.abc import Mapping


def holds_none(value: object) -> bool:
    """Whether `value` is None, or contains None in lists and mappings at any depth."""
    if isinstance(value, Mapping):
        return any(map(holds_none, value.values()))
    return any(map(holds_none, value)) if isinstance(value, list | tuple) else value is None
