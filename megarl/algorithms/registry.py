"""Looking up an algorithm's part by its name."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from converters.errors import UserError

Function = TypeVar("Function")


def lookup(registry: Mapping[str, Function], key: str, name: str) -> Function:
    """The function `name`, which the configuration gave as `key`.

    Raises UserError with the nearest name for one that is not in the registry.
    """
    if name in registry:
        return registry[name]
    nearest = difflib.get_close_matches(name, registry, n=1)
    raise UserError(
        f"{key}={name!r} is not known{f'; did you mean {nearest[0]!r}?' if nearest else ''}; "
        f"it must be one of {', '.join(registry)}"
    )
