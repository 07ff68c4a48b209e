"""Programs that are imported when they are needed."""

from importlib import import_module
from typing import Any

from converters.gc_pause import gc_paused


def load(module: str, name: str) -> Any:
    """Import `name` from `module` without looking for garbage, of which an import of thousands of modules has none."""
    with gc_paused():
        return getattr(import_module(module), name)
