"""Cases of a parametrized test that are left to `make test-long`: others show the same in a fraction of the time."""

from collections.abc import Iterable
from typing import Any

import pytest


def but_long(names: Iterable[str], *long: str) -> list[Any]:
    """All names, of which the `long` ones are marked so."""
    all_names = list(names)
    if missing := set(long) - set(all_names):
        raise ValueError(f"no such cases: {', '.join(sorted(missing))}")
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in all_names]
