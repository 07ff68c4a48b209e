"""None in what parquet holds: a struct has all keys that it has in any row, with None where its own row lacks one."""

from collections.abc import Mapping


def holds_none(value: object) -> bool:
    """Whether None is in lists and mappings of any depth, or is it."""
    if isinstance(value, Mapping):
        return any(map(holds_none, value.values()))
    return any(map(holds_none, value)) if isinstance(value, list | tuple) else value is None
