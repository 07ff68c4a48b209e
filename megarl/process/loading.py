"""Imports modules when they are first needed."""

from importlib import import_module
from typing import Any

from converters.gc_pause import gc_paused


def load(module: str, name: str) -> Any:
    """Import `name` from `module` with garbage collection paused, which only slows an import of many modules."""
    with gc_paused():
        return getattr(import_module(module), name)
