"""Looking up an algorithm's part by its name."""

from collections.abc import Mapping
from typing import TypeVar

from converters.errors import UserError, did_you_mean

Function = TypeVar("Function")


def lookup(registry: Mapping[str, Function], key: str, name: str) -> Function:
    """The function `name`, which the configuration gave as `key`.

    Raises UserError with the nearest name for one that is not in the registry.
    """
    if name in registry:
        return registry[name]
    raise UserError(
        f"{key}={name!r} is not known{did_you_mean(name, registry)}; it must be one of {', '.join(registry)}"
    )
