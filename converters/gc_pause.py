"""Pauses Python's garbage collector while there is no garbage to find."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the collector while hundreds of thousands of live objects are created.

    It would take most of the time to scan them. Also a decorator, for the duration of the function.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def gc_frozen(*, collect: bool = False) -> Iterator[None]:
    """Exclude existing objects from garbage collection inside the context; with `collect`, free garbage first.

    Scanning half a million objects of imported modules takes a tenth of a second, during which no thread runs: a
    quarter of the controller's time when thousands of responses arrive. Nested in another such context, objects stay
    frozen until the outer one ends.
    """
    was_frozen = gc.get_freeze_count() > 0
    if collect:
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            # Some may be garbage by then, and libraries (nanobind 2) complain if Python exits before it is freed.
            gc.unfreeze()
